"""Input processes as they are: equal batches, and nothing left of them however an iteration or its process ends."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from vitline.infra.settings import inherited_environment
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

from ....eventually import eventually

pytestmark = pytest.mark.slow
CONFIG = InputConfig(
    global_batch_size=12, num_lanes=6, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
ROOT = Path(__file__).parents[4]


def start(corpus, num_steps=None, processes=2):
    given = {"seed": 11, "micro_batch_size": 5, "num_steps": num_steps, "loading": LoaderResources(processes=processes)}
    return source_batches([Source(corpus.store, corpus.manifest, "train")], CONFIG, **given)


def descriptors():
    return [link for link in map(_target, os.listdir("/proc/self/fd")) if "vitline-batches" in link]


def _target(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def children():
    """Input processes of this process that are alive."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if "vitline.vit.input.decoding" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_batches_are_equal_and_nothing_is_left_at_the_end(tiny):
    for one, other in zip(start(tiny, 9), start(tiny, 9, processes=0), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine.images, theirs.images)
            assert torch.equal(mine.labels, theirs.labels)
        del one, other, mine, theirs
    gc.collect()
    assert children() == []
    assert descriptors() == []


def nothing_is_left():
    gc.collect()  # what a thread raised when its process was killed refers to itself, and to memory of batches
    return not children() and not descriptors()


def interrupted(batches):
    for number, _ in enumerate(batches):
        if number == 2:
            threading.Thread(target=signal.pthread_kill, args=(threading.get_ident(), signal.SIGINT)).start()


@pytest.mark.parametrize("how", ["close", "drop", "interrupt", "error"])
def test_nothing_is_left_of_an_iteration_that_is_broken_off(tiny, how):
    batches = start(tiny)
    step = next(batches)
    assert len(children()) == 2
    if how == "close":
        batches.close()
        assert children() == []
        assert step[0].images.any()  # memory of batches in use stays
    elif how == "error":
        with pytest.raises(ZeroDivisionError), batches:
            raise ZeroDivisionError
    elif how == "interrupt":
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests before this one have left
        with pytest.raises(KeyboardInterrupt), batches:
            interrupted(batches)
        signal.signal(signal.SIGINT, handler)
    del step, batches
    eventually(nothing_is_left)


def test_a_killed_process_is_an_error_that_names_it(tiny):
    batches = start(tiny)
    next(batches)
    victim = children()[1]
    victim.kill()
    with pytest.raises(RuntimeError, match=rf"Input process [12] of 2 \(pid {victim.pid}\) ended by SIGKILL"):
        for _ in batches:
            pass
    assert children() == []


PARENT = """
import os, signal, sys
from vitline.data_prep.shard_format import load_manifest
from vitline.infra.storage import open_store
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.data_prep.shard_format import Manifest

store, manifest = open_store(sys.argv[1]), Manifest.model_validate_json(sys.argv[2])
config = InputConfig.model_validate_json(sys.argv[3])
batches = source_batches([Source(store, manifest, "train")], config, seed=1, micro_batch_size=5, loading=LoaderResources(processes=2))
next(batches)
print("began", flush=True)
if sys.argv[4] == "exit":
    sys.exit(3)
signal.pause()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGKILL with a process that stands still", "SIGTERM", "exit"])
def test_the_processes_end_with_their_parent(tiny, how):
    arguments = [tiny.store.uri, tiny.manifest.model_dump_json(), CONFIG.model_dump_json(), how]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdout=subprocess.PIPE,
        env=inherited_environment((), PYTHONPATH=str(ROOT)),
    )
    found = []
    try:
        assert parent.stdout.readline() == b"began\n"
        if how != "exit":
            found = [p for p in psutil.Process(parent.pid).children() if "vitline.vit.input.decoding" in p.cmdline()]
            assert len(found) == 2
        if "stands still" in how:
            found[0].suspend()
        if how != "exit":
            parent.send_signal(getattr(signal, how.split()[0]))
        parent.wait(240)
        eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in found))
        if how == "exit":
            assert parent.returncode == 3
    finally:
        parent.kill()
        parent.wait()
        for process in found:
            if process.is_running():
                process.kill()
