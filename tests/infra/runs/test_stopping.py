"""A signal to a real process becomes a stop request in the store; the process exits in time even if nothing reacts to it."""

import signal
import subprocess
import sys
import threading

import pytest

from vitline.infra.runs.run_state import read_stop, request_stop
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import open_store

from ...eventually import eventually

UNRESPONSIVE_JOB = """
import signal, sys, threading, time
from vitline.infra.runs.run_state import read_stop
from vitline.infra.runs.stopping import joining_ray, stop_on_signals
from vitline.infra.storage import open_store

class FromTheRequestOn(threading.Timer):  # so that the time suffices to store it
    def run(self):
        while read_stop(open_store(sys.argv[1])) is None:
            time.sleep(0.01)
        super().run()

threading.Timer = FromTheRequestOn
stop_on_signals(sys.argv[1], attempt=3, grace_s=1.0)
with joining_ray():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as ray.init does
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_stored_as_a_stop_request_and_ends_an_unresponsive_job_with_75(tmp_path, number):
    run = open_store(str(tmp_path))
    job = subprocess.Popen([sys.executable, "-c", UNRESPONSIVE_JOB, run.uri], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    assert job.wait(120) == 75
    stop = read_stop(run)
    assert (stop["reason"], stop["attempt"], stop["by"]) == ("preempted", 3, signal.Signals(number).name)
    job.stdout.close()


def test_stop_poller_reports_requests_to_its_own_attempt_only(tmp_path):
    run = open_store(str(tmp_path))
    with StopPoller(run, 1) as first, StopPoller(run, 2) as second:
        request_stop(run, "cancelled", by="test", attempt=2)
        eventually(second.asked)
        first.read()
        assert (first.asked(), second.asked()) == (None, "cancelled")


def test_stop_poller_that_is_not_active_asks_the_store_nothing(tmp_path):
    run = open_store(str(tmp_path))
    request_stop(run, "cancelled", by="test", attempt=2)
    with StopPoller(run, 2, active=False) as poller:
        assert poller.asked() is None
        assert not [thread for thread in threading.enumerate() if thread.name == "stop-watch"]
