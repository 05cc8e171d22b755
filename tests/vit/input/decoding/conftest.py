"""Input processes as threads: the code of both sides, without the seconds that an interpreter takes to start."""

import os
import socket
import threading

import pytest

from vit.input.decoding import process, processes
from vit.input.decoding.shared_memory import Link


class Thread:
    """What `subprocess.Popen` is to a process."""

    pid = os.getpid()

    def __init__(self, others):
        self._link = Link(socket.socket(fileno=os.dup(others.fileno())))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        process.serve(self._link, parent_is_gone=lambda: None)
        self._link.close()

    def kill(self):
        self._link.close()

    def wait(self, timeout=None):
        self._thread.join(timeout)
        return 0


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(processes, "_start", Thread)
