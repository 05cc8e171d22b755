"""Samples of a machine's load during a training: their content, and that a failure does not disturb the training."""

import threading

import psutil
import pytest

from vitline.infra.system_metrics import SystemSampler


def test_sample_describes_this_machine_under_its_node_number():
    recorded = []
    with SystemSampler(lambda values, step: recorded.append((values, step)), node=3, step=lambda: 7):
        pass  # shorter than the interval: one sample at the end
    ((values, step),) = recorded
    assert step == 7
    assert {key.removeprefix("system/node3/") for key in values} == {
        "cpu_fraction",
        "memory_used_bytes",
        "process_memory_bytes",
        "disk_used_fraction",
        "network_receive_bytes_per_s",
    }
    assert 0 <= values["system/node3/cpu_fraction"] <= 1
    assert 0 < values["system/node3/disk_used_fraction"] <= 1
    assert 0 < values["system/node3/process_memory_bytes"] < values["system/node3/memory_used_bytes"]
    assert values["system/node3/memory_used_bytes"] <= psutil.virtual_memory().total


def test_samples_have_the_current_step_and_end_with_the_context():
    steps, seen, enough = iter(range(100)), [], threading.Event()

    def record(values, step):
        seen.append((step, values["system/node0/gpu_memory_used_bytes"]))
        if len(seen) >= 3:
            enough.set()

    sampler = SystemSampler(record, 0, lambda: next(steps), gpu_memory_bytes=lambda: 5, every_s=0.001)
    with sampler:
        assert enough.wait(60)
    assert seen[:3] == [(0, 5.0), (1, 5.0), (2, 5.0)]
    assert not sampler._thread.is_alive()


@pytest.mark.parametrize("broken", ["record", "step"])
def test_failure_of_sampling_is_logged_but_not_raised(broken, caplog):
    def fail(*_):
        raise OSError("disk full")

    parts = {"record": lambda values, step: None, "step": lambda: 0} | {broken: fail}
    with SystemSampler(parts["record"], 0, parts["step"], every_s=1e6):
        pass
    assert "the system metrics of this machine cannot be sampled" in caplog.text
