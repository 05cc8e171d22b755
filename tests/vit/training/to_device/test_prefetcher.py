"""The calls of the path of a GPU, followed on fake streams and a device without memory: there is no GPU here."""

import contextlib

import pytest
import torch

from vitline.vit.input.batches import Batch, MultiLabels
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World

META = torch.device("meta")


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What happens on the fake streams, in order."""
    log = []
    computing, copies, current = FakeStream("computing", log), FakeStream("copies", log), []

    @contextlib.contextmanager
    def inside(stream):
        current.append(stream.name)
        yield
        current.pop()

    def to(tensor, device, non_blocking):
        assert (current, device, non_blocking) == (["copies"], META, True)
        log.append(f"copy {tensor.pinned}")
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def pinned(tensor):
        copy = tensor.clone()
        copy.pinned, copy.to = tuple(tensor.shape), lambda *args, **given: to(copy, *args, **given)
        return copy

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: log.append(f"{tuple(self.shape)} used by {stream.name}")
    )
    return log


def step_of(number, log):
    log.append(f"step {number} taken")
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    return [Batch(images, MultiLabels.of([([1], None)], 2), torch.tensor([True, False]), number, 1, [(0, "bad")])]


def test_a_step_is_copied_ahead_and_the_computation_waits_for_its_copy(log):
    ready = True
    steps = DevicePrefetcher((step_of(i, log) for i in range(3)), META, lambda: ready)
    parts = [(2, 4, 4, 3), (2, 1), (2, 1), (2,)]
    copied, used = (
        [f"copy {p}" for p in parts],
        ["computing waits for copies", *(f"{p} used by computing" for p in parts)],
    )
    [first] = next(steps)
    assert log == ["step 0 taken", *copied, *used]
    assert (first.images.device, first.labels.weights.device, first.valid.device) == (META,) * 3
    assert (first.bad, first.num_valid, first.mixed_labels) == ([(0, "bad")], 0, None)

    log.clear()
    steps.copy_ahead()
    steps.copy_ahead()
    assert log == ["step 1 taken", *copied]
    log.clear()
    assert next(steps)[0].first_slot == 1
    assert log == used

    ready = False
    log.clear()
    steps.copy_ahead()
    assert log == []
    assert next(steps)[0].first_slot == 2
    assert log == ["step 2 taken", *copied, *used]
    with pytest.raises(StopIteration):
        next(steps)


def test_the_next_step_is_copied_before_the_host_waits_for_the_update(tiny_recipe, make_batch, monkeypatch):
    order = []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *_: order.append("host waits") or torch.tensor(float("nan"))
    )
    state = initial_state(tiny_recipe, 5, World().device)
    state.model.head.register_full_backward_hook(lambda *_: order.append("backward"))
    train_step(state, state.model, [make_batch(0)] * 2, tiny_recipe, World(), lambda: order.append("copy ahead"))
    assert order == ["backward", "backward", "copy ahead", "host waits"]


def test_on_a_cpu_the_batches_pass_through_untouched(make_batch):
    steps = [[make_batch(i)] for i in range(2)]
    on_device = DevicePrefetcher(iter(steps), torch.device("cpu"), lambda: True)
    on_device.copy_ahead()
    assert next(on_device) is steps[0]
    assert next(on_device) is steps[1]


def test_a_wait_of_the_host_counts_where_the_device_has_no_work_left(log, monkeypatch):
    clock = 0.0
    monkeypatch.setattr("vitline.vit.training.to_device.prefetcher.time.perf_counter", lambda: clock)

    class Event:
        """Done 3 s after it was recorded, which is when the device has done a step."""

        def __init__(self, **_):
            pass

        def record(self, stream):
            self.done = clock + (3 if stepped else 0)

        def query(self):
            return clock >= self.done

        def synchronize(self):
            assert self.query()

        def elapsed_time(self, later):
            return 1_000 * (later.done - self.done)

    def slow():
        nonlocal clock
        for number, seconds in enumerate([2, 1, 5, 7]):
            clock += seconds
            yield step_of(number, log)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps, waited = DevicePrefetcher(slow(), META), []
    for _ in range(4):
        stepped = False
        next(steps)
        waited.append(steps.waited_s)
        stepped = True
        steps.limit_queue()
    # Before the first step nothing is timed. The second comes in time; the device was idle for 2 of the 5 s, then for 4 of the 7.
    assert waited == [0, 0, 2, 6]
