"""Prefetch threads: order, bounds and errors; torch's thread count stays as it was."""

import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from vitline.vit.input.load_queue import AHEAD, NOW, Load, LoadQueue
from vitline.vit.input.prefetch import Prefetcher

from ...eventually import eventually


def test_items_are_yielded_in_order_after_their_tasks():
    done = set()

    def task(i, j):
        time.sleep(0.001 * ((i * 7 + j) % 3))
        done.add((i, j))

    work = (([lambda i=i, j=j: task(i, j) for j in range(4)], i) for i in range(30))
    for i in Prefetcher(work, threads=3, depth=2):
        assert {(i, j) for j in range(4)} <= done


def test_prefetcher_is_at_most_its_depth_ahead():
    begun = []

    def work():
        for i in range(100):
            begun.append(i)
            yield [], i

    with Prefetcher(work(), threads=1, depth=3) as items:
        for i in range(5):
            assert next(items) == i
            time.sleep(0.02)
            assert begun[-1] <= i + 3 + 1  # the queue, and one item that the planner holds


def test_error_of_a_task_or_plan_is_raised_at_its_item():
    def fail():
        raise ValueError("this one")

    items = Prefetcher(iter([([], 0), ([fail], 1), ([], 2)]), threads=2, depth=2)
    assert next(items) == 0
    with pytest.raises(ValueError, match="this one"):
        next(items)
    assert list(items) == []

    def plan():
        yield [], 0
        raise RuntimeError("no plan")

    items = Prefetcher(plan(), threads=1, depth=2)
    assert next(items) == 0
    with pytest.raises(RuntimeError, match="no plan"):
        next(items)


def test_close_cancels_pending_tasks_and_calls_on_close_once():
    closed, release = [], threading.Event()
    items = Prefetcher(
        iter([([release.wait], 0), *(([lambda: None], i) for i in range(1, 9))]),
        threads=1,
        depth=4,
        on_close=lambda: closed.append(True),
    )
    threading.Timer(0.05, release.set).start()
    items.close()
    items.close()
    assert closed == [True]


def test_tasks_use_one_torch_thread_and_other_threads_are_unchanged():
    before, seen, elsewhere = torch.get_num_threads(), [], []
    torch.set_num_threads(2)
    try:
        list(Prefetcher(iter([([lambda: seen.append(torch.get_num_threads())] * 8, 0)]), threads=2, depth=1))
        fresh = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
        assert seen == [1] * 8
        assert elsewhere == [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_item_is_ready_once_all_its_tasks_have_run_and_the_end_is_none():
    release = threading.Event()
    with Prefetcher(iter([([nothing, release.wait], 0)]), threads=1, depth=2) as items:
        assert not items.is_ready
        release.set()
        eventually(lambda: items.is_ready, every_s=0.001)
        assert next(items) == 0
        assert not items.is_ready


def nothing():
    pass


@pytest.mark.parametrize("slow", ["store", "decode", "hand_over"])
def test_waits_are_counted_by_what_is_waited_for(slow):
    loads = LoadQueue(1)

    def pause(of):
        time.sleep(0.03 if of == slow else 0.0)

    def work():
        for i in range(4):
            loads.wait_for(Load(partial(pause, "store")))
            pause("hand_over")
            yield [partial(pause, "decode"), nothing], i

    with Prefetcher(work(), threads=1, depth=1, store_waited_s=lambda: loads.waited_s) as items:
        assert list(items) == [0, 1, 2, 3]
        waited = items.waits._asdict()
        assert max(waited, key=waited.get) == f"{slow}_s"
        assert min(waited.values()) >= 0
        assert sum(waited.values()) == pytest.approx(items.waits.total_s)
        assert (items.effort.tasks_s > 4 * 0.03) == (slow == "decode")
        assert items.effort.tasks_cpu_s < 0.03  # a task that sleeps computes nothing
    loads.close()


def test_urgent_loads_run_first_and_once():
    gate, order = threading.Event(), []
    loads = LoadQueue(1)
    first = Load(gate.wait)
    ahead, urgent = Load(lambda: order.append("ahead")), Load(lambda: order.append("urgent"))
    loads.put(first, NOW)
    loads.put(ahead, AHEAD)
    loads.put(urgent, NOW)
    loads.put(urgent, AHEAD)
    gate.set()
    while len(order) < 2:
        time.sleep(0.001)
    loads.close()
    assert order == ["urgent", "ahead"]


def test_as_many_threads_start_as_loads_are_under_way():
    loads, together = LoadQueue(8), threading.Barrier(4)
    for _ in range(3):
        quick = Load(lambda: None)
        loads.put(quick, NOW)
        quick.result()
    waiting = [Load(partial(together.wait, 60)) for _ in range(4)]
    for load in waiting:
        loads.put(load, AHEAD)
    while not all(load.begun for load in waiting):
        time.sleep(0.001)
    assert sorted(load.result() for load in waiting) == [0, 1, 2, 3]
    assert 4 <= loads.num_threads <= 7
    loads.close()


def test_unreferenced_load_is_dropped():
    gate, ran, loads = threading.Event(), [], LoadQueue(1)
    first, kept = Load(gate.wait), Load(lambda: ran.append("kept"))
    loads.put(first, NOW)
    loads.put(Load(lambda: ran.append("dropped")), AHEAD)
    loads.put(kept, AHEAD)
    gate.set()
    while not ran:
        time.sleep(0.001)
    loads.close()
    assert ran == ["kept"]


def test_pending_load_runs_in_the_waiting_thread_and_keeps_its_error():
    assert Load(threading.get_ident).result() == threading.get_ident()
    broken = Load(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.result()


OPEN_AT_THE_END = """
import atexit, sys, threading, time

@atexit.register  # before vitline.vit.input.prefetch registers its own, so after it
def threads_left():
    print([thread.name for thread in threading.enumerate()])

from vitline.vit.input.prefetch import Prefetcher

def slow():
    for i in range(10**6):
        yield [lambda: None], i
        time.sleep(0.5)

items = iter(Prefetcher(slow(), threads=2, depth=3))
next(items)
print([thread.name for thread in threading.enumerate()])
sys.exit(3)
"""


def test_a_program_that_leaves_an_iteration_open_ends_its_threads_first():
    """A thread of Arrow or torch that outlives Python aborts the process, once in many times."""
    done = subprocess.run([sys.executable, "-c", OPEN_AT_THE_END], capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    during, after = map(eval, done.stdout.splitlines())
    assert len(during) > 1
    assert after == ["MainThread"]
