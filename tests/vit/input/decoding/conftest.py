"""The extension, built for the tests, which are skipped where it cannot be built; and input processes as threads: the code of both
sides, without the seconds that an interpreter takes to start."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest

from vitline.vit.input.decoding import process, processes
from vitline.vit.input.decoding.shared_memory import Link

SOURCE = Path(__file__).parents[4] / "vit" / "native" / "vitline_native.c"


def build(folder: Path, *flags: str) -> Path:
    """The extension as `vit/native/setup.py` builds it, with further flags. Skips the test where that is impossible."""
    if (compiler := shutil.which(os.environ.get("CC", "cc"))) is None:
        pytest.skip("no C compiler")
    module = folder / "vitline_native.abi3.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O3",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    command += [*flags, f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(module), "-ljpeg", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No such file or directory" in done.stderr or "cannot find -ljpeg" in done.stderr:
        pytest.skip("no headers of Python or of libjpeg-turbo")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return module


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("vitline_native", build(tmp_path_factory.mktemp("native")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Thread:
    """What `subprocess.Popen` is to a process."""

    pid = os.getpid()

    def __init__(self, others):
        self._socket = socket.socket(fileno=os.dup(others.fileno()))
        self._link = Link(self._socket)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        process.serve(self._link, parent_is_gone=lambda: None)
        self._link.close()

    def kill(self):
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout=None):
        self._thread.join(timeout)
        return 0


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(processes, "_start", Thread)
