"""A full disk leaves no half of a file that a stack reads at its next start."""

import stat
from types import SimpleNamespace

import pytest

from vitline.infra.local import seaweed
from vitline.infra.local.access.mutual_tls import make_certificates
from vitline.infra.local.paths import write_private
from vitline.infra.local.stack_config import ensure_secret


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: make_certificates(folder),
        lambda folder: ensure_secret(folder / "login", f"vitline:{'5' * 32}"),
    ],
)
def test_secret_that_does_not_fit_on_the_disk_is_not_used_in_part(tmp_path, full_disk, make):
    with full_disk(20), pytest.raises(OSError, match="File too large"):
        make(tmp_path)
    assert not list(tmp_path.iterdir())
    make(tmp_path)
    files = [*tmp_path.iterdir()]
    assert files
    assert all(path.stat().st_size > 20 for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_secret_takes_the_place_of_a_file_that_others_could_read(tmp_path):
    (tmp_path / "ray-token").write_text("old")
    (tmp_path / "ray-token").chmod(0o644)
    write_private(tmp_path / "ray-token", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["ray-token"]
    assert stat.S_IMODE((tmp_path / "ray-token").stat().st_mode) == 0o600


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
