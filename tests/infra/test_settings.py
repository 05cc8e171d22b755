"""Settings are read from the documented environment variables, not from others that are named like a field."""

from pathlib import Path

import pytest

from infra.settings import Settings


def test_only_documented_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:  # $HOME is on every machine, $ROOT on some
        monkeypatch.setenv(name.upper(), "/somewhere/else")
    documented = ("VITLINE_ROOT", "VITLINE_HOME", "RAY_ADDRESS", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI")
    for name in ("VITLINE_ROOT", "VITLINE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert (Settings().root, Settings().home) == (f"{tmp_path}/.vitline/store", None)
    for name in documented:
        monkeypatch.setenv(name, "/given")
    read = Settings()
    assert (read.root, read.home, read.ray_address) == ("/given", Path("/given"), "/given")
    assert read.mlflow_tracking_uri == "/given"
