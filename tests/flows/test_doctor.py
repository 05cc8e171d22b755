"""The doctor on this machine, and on ones where something is wrong."""

import socket

import pytest

from flows import doctor
from flows.doctor import examine
from infra.settings import Settings
from infra.storage import open_store


@pytest.fixture
def settings_of(monkeypatch, tmp_path):
    """settings_of(root, ...): settings without what this shell says, and a temporary folder that Ray can use."""
    for name in ("RAY_ADDRESS", "VITLINE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/tmp")

    def make(root=None, **changes) -> Settings:
        return Settings(root=str(root or tmp_path / "store"), **changes)

    return make


def by_name(settings):
    return {check.name: check for check in examine(settings)}


def test_this_machine_passes_and_nothing_is_left_in_the_store(settings_of, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 10**6)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 10**6)
    checks = by_name(settings_of())
    # A source tree on PYTHONPATH has no metadata; `make install` gives it.
    assert {name for name, check in checks.items() if not check.ok} <= {"packages"}
    assert list(checks) == ["python", "packages", "memory", "disk", "store", "accelerator", "ray"]
    assert list(open_store(tmp_path / "store").list()) == []


def test_a_file_in_place_of_the_root_is_named_and_the_rest_still_examined(settings_of, tmp_path):
    (tmp_path / "taken").write_text("not a folder")
    checks = by_name(settings_of(tmp_path / "taken"))
    assert not checks["store"].ok
    assert str(tmp_path / "taken") in checks["store"].found
    assert checks["store"].advice
    assert checks["accelerator"].ok
    assert checks["ray"].ok


def test_a_store_of_an_unknown_kind_is_named_with_those_there_are(settings_of):
    check = by_name(settings_of("ftp://host/x"))["store"]
    assert not check.ok
    assert "ftp://host/x" in check.found
    assert "s3://bucket" in check.found


def test_a_store_without_conditional_writes_fails(settings_of, monkeypatch):
    def overwrites(store, key, data):
        store.write(key, data)
        return store.read_tagged(key)[1]

    monkeypatch.setattr("infra.storage.FileStore.create", overwrites)
    check = by_name(settings_of())["store"]
    assert not check.ok
    assert "RuntimeError" in check.found


def test_too_little_memory_and_disk_come_with_advice(settings_of, monkeypatch):
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 10**18)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 10**18)
    checks = by_name(settings_of())
    for name in ("memory", "disk"):
        assert (checks[name].mark, bool(checks[name].advice)) == ("FAIL", True)


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(
        doctor,
        "requires",
        lambda name: ["numpy>=999", "no-such-package>=1", "nor-this-one; extra == 'dev'", "pydantic>=2"],
    )
    check = doctor.check_packages()
    assert not check.ok
    assert "numpy" in check.found
    assert "no-such-package is missing" in check.found
    assert "nor-this-one" not in check.found
    assert "pydantic" not in check.found
    assert "make install" in check.advice


def test_a_temporary_folder_that_is_too_deep_for_sockets_is_found(settings_of, monkeypatch):
    settings = settings_of()
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/" + "deep/" * 20)
    check = by_name(settings)["ray"]
    assert (check.ok, "TMPDIR" in check.advice) == (False, True)


def test_a_job_server_that_does_not_answer_is_named(settings_of, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        monkeypatch.setattr(doctor, "JOB_SERVER_AWAY_S", 0.1)
        check = doctor.attempt("ray", lambda: doctor.check_ray(settings_of(ray_address=address)))
    assert not check.ok
    assert address in check.found
