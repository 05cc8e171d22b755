"""Hosts on this machine reach each other by their addresses, and can be slowed, cut off, killed and removed."""

import contextlib
import socket
import subprocess
import sys
import time

import psutil
import pytest

from vitline.infra.children import child_environment

from ..eventually import eventually
from .hosts import SPACES, Hosts, remove_leftovers, why_not_here

SERVER = """
import os, socket
server = socket.create_server((os.environ["ADDRESS"], 7000))
while True:
    connection, _ = server.accept()
    connection.sendall(os.uname().nodename.encode())
    connection.close()
"""
KILLED = """
import os, sys, pathlib
from tests.cluster.hosts import Hosts
with Hosts(pathlib.Path(sys.argv[1]), ["h0"]) as hosts:
    hosts.start("h0", ["sleep", "1000"], pathlib.Path(os.devnull), {})
    os._exit(0)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not_here()), reason=f"hosts on this machine: {why_not_here()}"),
]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts; on `h1` a server tells the name of its host."""
    with Hosts(tmp_path, ["h0", "h1"]) as hosts:
        hosts.start("h1", [sys.executable, "-c", SERVER], tmp_path / "log", {"ADDRESS": hosts.address("h1")})
        assert answer(hosts, to="h0") == "h1"
        yield hosts


def answer(hosts, to):
    """What the server says to a host that reaches it. It may be late, on a busy machine."""
    return eventually(lambda: said_by(hosts, "h1", to), awaited="an answer of h1", every_s=0.05)


def said_by(hosts, host, to=None):
    """What the server of `host` answers to the host `to`, by default to this machine; empty without an answer."""
    there = hosts.inside(to) if to else contextlib.nullcontext()
    with there, contextlib.suppress(OSError), socket.create_connection((hosts.address(host), 7000), 1) as connection:
        return connection.recv(100).decode()
    return ""


def test_a_host_is_reached_from_other_hosts_only(hosts):
    assert answer(hosts, to="h0") == "h1"
    assert said_by(hosts, "h1") == ""


def test_a_host_that_is_cut_off_works_on_without_the_others(hosts):
    hosts.cut("h1")
    assert said_by(hosts, "h1", to="h0") == ""
    assert answer(hosts, to="h1") == "h1"


def test_a_slow_host_stands_still_at_times_and_works_on_afterwards(hosts):
    with hosts.slow("h1", share=0.5):
        eventually(lambda: hosts.processes("h1")[0].status() == psutil.STATUS_STOPPED, 240, "a stop", 0.02)
    assert answer(hosts, to="h0") == "h1"


def test_a_distant_host_answers_no_sooner_than_its_packets_arrive(hosts):
    """Four of them are needed for an answer: to connect, that this was heard, the connection, the answer."""
    began = time.monotonic()
    with hosts.distant("h1", delay_s=0.1):
        assert answer(hosts, to="h0") == "h1"
    assert time.monotonic() - began >= 4 * 0.1
    assert answer(hosts, to="h0") == "h1"


def test_a_killed_host_runs_nothing(hosts):
    hosts.kill("h1")
    assert hosts.processes("h1") == []
    assert said_by(hosts, "h1", to="h0") == ""


def test_hosts_of_a_killed_run_are_removed(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=child_environment())
    assert killed.wait() == 0
    left = list(SPACES.glob(f"vlc-{killed.pid}-*"))
    assert len(left) == 2
    remove_leftovers()
    assert not any(space.exists() for space in left)
