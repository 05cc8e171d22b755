"""When the loop waits for a GPU, and whether the compiler gets the network whole: counted without a GPU, on a device without memory.

The tensors of the device `meta` have no values, so whoever asks for one is seen: a wait for a GPU.
"""

import contextlib
import math
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig, MaskedPatchConfig
from vitline.vit.models.build import meta_network
from vitline.vit.training import sync_points
from vitline.vit.training.guard.nonfinite_steps import NonfiniteSteps
from vitline.vit.training.loop import Hook, train, with_optimizer
from vitline.vit.training.sync_points import SyncPoints
from vitline.vit.training.world import World

META, aten = torch.device("meta"), torch.ops.aten


class WaitTimes(TorchDispatchMode):
    """Notes the step at which somebody asks for values of the device, who gets ones, or copies there from memory that is not pinned.
    Counts the operators on the device."""

    def __init__(self, step):
        super().__init__()
        self.step, self.steps, self.operators = step, [], Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        to = (kwargs or {}).get("device")
        if not any(x.device == META for x in given):
            if to == META and any(x.ndim and not hasattr(x, "pinned") for x in given):
                self.steps.append(self.step())
            return func(*args, **(kwargs or {}))
        to = to or META
        if func is aten._local_scalar_dense.default or to != META:
            self.steps.append(self.step())
            return 1.0 if to == META else torch.ones(given[0].shape, dtype=given[0].dtype)
        self.operators[self.step()] += 1
        return (
            None if func is aten._fused_sgd_.default else func(*args, **(kwargs or {}))
        )  # torch has no meta kernel for it


class Stream:
    wait_stream = record = synchronize = lambda self, *_: None

    def query(self):
        return False  # there is always work left


def pinned(tensor):
    tensor.pinned = True
    return tensor


@pytest.fixture
def fake_gpu(monkeypatch):
    """The device `meta` in the place of a GPU, with fused optimizers, streams and pinned memory."""
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(sync_points, "EVERY_S", 1e6)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"optim.optimizer": "sgd", "loss": "sigmoid", "input.augment.mixup_alpha": 0.2},
        {"masked_patches": MaskedPatchConfig(), "average_decay": None},
    ],
    ids=["adamw", "sgd", "masked patches"],
)
def test_the_host_waits_for_a_gpu_at_logged_steps_and_hooks_only(tiny_recipe, make_batch, change):
    recipe = replace(tiny_recipe, **{"total_steps": 20, **change})
    state = with_optimizer(meta_network(recipe.model, 5), recipe)
    reports, saved = [], []
    with WaitTimes(lambda: state.step) as waits:
        outcome = train(
            state,
            ([make_batch(step, 4), make_batch(step, 4, start=4)] for step in range(20)),
            recipe,
            ExecutionConfig(log_every_steps=5),
            World(device=META),
            report=lambda step, metrics: reports.append(step),
            hooks=[Hook(8, lambda state: saved.append(state.step))],
            pause_at_step=12,
        )
    assert (outcome, reports, saved) == ("finished", [5, 10, 15, 20], [8, 16, 20])
    # The first meeting tells how long a step takes. The pause is one, too.
    assert sorted(set(waits.steps)) == [1, 5, 8, 10, 12, 15, 16, 20]
    assert len({waits.operators[step] for step in (2, 3, 6)}) == 1, "steps that do different work"


def test_ranks_on_gpus_meet_about_once_a_second(monkeypatch):
    clock, met = 100.0, []
    monkeypatch.setattr(sync_points.time, "monotonic", lambda: clock)
    meetings = SyncPoints(7, World(), every_step=False, stop_requested=lambda: "paused" if clock > 103 else None)
    for step in range(8, 48):
        clock += 0.125
        if meetings.due(step):
            met.append((step, *meetings.sync(step, num_bad=step)))
    assert met == [(8, None, 8, 1), (16, None, 16, 8), (24, None, 24, 8), (32, "paused", 32, 8), (40, "paused", 40, 8)]


def test_non_finite_steps_that_are_read_late_are_counted_in_a_row_at_their_own_steps():
    nonfinite, reports = NonfiniteSteps(), []

    def read(first, norms):
        for step, norm in enumerate(norms, first):
            nonfinite.add(step, torch.tensor(norm))
        return nonfinite.read(lambda step, metrics: reports.append((step, metrics["guard/nonfinite_steps"])))

    assert read(1, [1.0, math.nan, math.inf, 1.0, math.nan]) == 2
    assert read(6, []) == 0
    assert read(6, [math.nan, 1.0]) == 2
    assert reports == [(2, 1), (3, 2), (5, 1), (6, 2)]


@pytest.mark.slow
def test_the_compiler_works_once_for_all_blocks_alike_and_finds_no_break():
    """In a process of its own: the checks of shapes in tests stand in the way of torch's compiler."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from vitline.vit.config import ExecutionConfig
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.models.masked_patches import MaskedPatchModel, draw_corruption
from vitline.vit.training.parallel import wrap
from vitline.vit.training.world import World

compile, counter = torch.compile, CompileCounter()
torch.compile = lambda forward: compile(forward, backend=counter, fullgraph=True)
torch.nn.Module.compile = lambda model: vars(model).update(forward=torch.compile(model.forward))

def check(graphs, network, *more, checkpointing="none"):
    counter.clear()
    torch.compiler.reset()
    network = wrap(network.train(), ExecutionConfig(compile=True, activation_checkpointing=checkpointing), World())
    for _ in range(2):
        network(torch.zeros(2, 32, 32, 3, dtype=torch.uint8), *more).sum().backward()
    assert counter.frame_count == graphs, (type(network), checkpointing, counter.frame_count)
    assert not counters["graph_break"]

# The stem of a Vision Transformer is a graph of its own, and the blocks are one: twelve are three parts.
encoder = dict(image_size_px=32, embed_dim=16, depth=12, num_heads=2, mlp_dim=32)
noise = dict(dropout_rate=0.1, stochastic_depth_rate=0.1)
patches = dict(patch_size_px=8, **encoder)
check(2, build_network(ViTConfig(**patches), 5))
# The first part has a block that is never dropped.
for mode in ("none", "full", "selective"):
    check(3, build_network(ViTConfig(**patches, **noise), 5), checkpointing=mode)
check(2, build_network(ViTConfig(**patches, pool="gap", pos_embed="relative"), 5))
check(2, build_network(ViTConfig(**patches, pool="map", pos_embed="sincos-2d"), 5))
check(2, MaskedPatchModel(build_network(ViTConfig(**patches), 5), "pixels-l2"), draw_corruption(torch.rand(2, 32)))
check(1, build_network(HybridConfig(stages=(1, 1), **encoder), 5))
check(1, build_network(BiTConfig(image_size_px=32, stages=(1, 1)), 5))
"""
