"""A full disk leaves no half of a file that a stack reads at its next start."""

from types import SimpleNamespace

import pytest

from infra.local import seaweed
from infra.local.ray_node import make_token


def test_token_that_does_not_fit_on_the_disk_is_not_used_in_part(tmp_path, full_disk):
    with full_disk(20), pytest.raises(OSError, match="File too large"):
        make_token(tmp_path / "token")
    assert not list(tmp_path.iterdir())
    make_token(tmp_path / "token")
    assert len((tmp_path / "token").read_text()) == 64
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_stored_sentinel_that_does_not_fit_on_the_disk_is_stored_again(tmp_path, full_disk, monkeypatch):
    stored = []

    def request(config, method, data, timeout_s):
        stored.extend([data] if method == "PUT" else [])
        return stored[-1]

    monkeypatch.setattr(seaweed, "_request", request)
    config = SimpleNamespace(sentinel=tmp_path / "sentinel", url=lambda service: "http://127.0.0.1")
    with full_disk(10):
        assert "File too large" in seaweed.problem(config)
    assert seaweed.problem(config) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["sentinel"]
