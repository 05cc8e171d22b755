"""How often the spike guard takes a quiet training for one with spikes, by threshold; and what its check costs.

    python -m tests.benchmarks.spike_guard [--steps 1000]

Trains the demo's network on digits with several batch sizes and learning rates, without a guard, and judges the losses and gradient
norms afterwards. A training that has no spike should have none found.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence

import torch

from vitline.data_prep.examples.presets import digits
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import replace
from vitline.infra.storage import Store, open_store
from vitline.vit.config import ExecutionConfig, SpikeGuardConfig, TrainRecipe
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.recipes import recipe_named
from vitline.vit.training.guard.spike_guard import SpikeGuard
from vitline.vit.training.loop import initial_state, train
from vitline.vit.training.world import World

THRESHOLDS = (4, 6, 8, 10, 15, 20)
Curve = list[tuple[float, float]]


def curve(corpus: Store, recipe: TrainRecipe) -> Curve:
    """Loss and gradient norm of each step of a training."""
    found: Curve = []
    manifest, world = load_manifest(corpus), World()
    loading = LoaderResources(decoded_cache_bytes=2**28)
    batches = source_batches(
        [Source(corpus, manifest, "train")], recipe.input, seed=0, micro_batch_size=64, loading=loading
    )
    with batches:
        train(
            initial_state(recipe, manifest.num_classes, world.device),
            batches,
            recipe,
            ExecutionConfig(log_every_steps=1),
            world,
            report=lambda _, metrics: found.append((metrics["train/loss"], metrics["optim/grad_norm"])),
        )
    return found


def spikes(of: Curve, threshold: float) -> int:
    guard = SpikeGuard(SpikeGuardConfig(action="skip", threshold=threshold))
    return sum(guard.judge(step, *values) is not None for step, values in enumerate(of, 1))


def microseconds(of: Curve) -> float:
    """Mean processor time of one check."""
    guard, start = SpikeGuard(SpikeGuardConfig(action="skip")), time.process_time()
    for step, values in enumerate(of, 1):
        guard.judge(step, *values)
    return 1e6 * (time.process_time() - start) / len(of)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000)
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        prepare([digits()], root)
        corpus = corpus_store(open_store(root), digits())
        recipe = replace(recipe_named("digits").make()[0], total_steps=steps)
        print("batch, learning rate: spikes at a threshold of " + ", ".join(map(str, THRESHOLDS)))
        for batch in (16, 128):
            for lr in (1e-4, recipe.optim.peak_lr, 4e-3):
                changed = replace(recipe, **{"input.global_batch_size": batch, "optim.peak_lr": lr})
                of = curve(corpus, changed)
                counts = ", ".join(str(spikes(of, threshold)) for threshold in THRESHOLDS)
                print(
                    f"{batch}, {lr:g}: {counts}; {microseconds(of):.0f} us a check; last loss {of[-1][0]:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
