"""What the tests can only simulate, checked on a GPU: waits of the host, steps that are not finite, losses, and the memory of `auto`.

    .venv/bin/python tests/benchmarks/gpu_checks.py [b16 l16]

One line for each check, of which the first three must say `none`, `exact` and at most 1e-3; then for each network how much of the
GPU's memory a step with `execution.micro_batch_size=auto` took, and what the plan says. Takes about a minute.
"""

import argparse
import itertools
import math
import sys
import warnings

import torch

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig, MaskedPatchConfig
from vitline.vit.cost.memory import activation_bytes
from vitline.vit.cost.micro_batch import memory_bytes, micro_batch_that_fits
from vitline.vit.cost.step_time import synthetic_batch
from vitline.vit.cost.throughput import recipe_of
from vitline.vit.models.variants import network_variant
from vitline.vit.training import loop, sync_points
from vitline.vit.training.loop import Hook, initial_state, train, with_optimizer
from vitline.vit.training.world import World

GPU = torch.device("cuda")
CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["b16", "l16"])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not supported: this program checks a GPU, and torch finds none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    changes = {
        "AdamW": {},
        "SGD, sigmoid, average": {"optim.optimizer": "sgd", "loss": "sigmoid", "average_decay": 0.99},
        "masked patches": {"masked_patches": MaskedPatchConfig()},
        "dropout": {"model.dropout_rate": 0.1, "model.stochastic_depth_rate": 0.1},
    }
    for name, change in changes.items():
        for compiled in (False, True):
            print(f"waits between logged steps, {name}{', compiled' if compiled else ''}: {waits(change, compiled)}")
    for optimizer in ("adamw", "sgd"):
        print(f"steps that are not finite, {optimizer}: {'exact' if skips_exactly(optimizer) else 'WRONG'}")
    print(f"losses of 20 steps in float32 beside those of the CPU: {distance_from_cpu():.1e} apart at most")
    for network in asked.networks:
        print(memory(network), flush=True)


def recipe_for(variant: str, batch: int, steps: int, precision="bfloat16", side=224, **changes):
    recipe = recipe_of(network_variant(variant, image_size_px=side), precision, batch)
    return replace(recipe, **{"total_steps": steps, "optim.warmup_steps": 1, **changes})


def batches(recipe, steps: int) -> list:
    """Of each step two micro-batches, the same in every call."""
    torch.manual_seed(0)
    half = recipe.input.global_batch_size // 2
    return [[synthetic_batch(recipe, CLASSES, half) for _ in range(2)] for _ in range(steps)]


def waits(change: dict, compiled: bool) -> str:
    """`none`, or the steps, neither logged nor with a hook, at which torch saw the host wait for the GPU. The first one, which compiles
    and meets, does not count."""
    recipe, seen = recipe_for("ti16", 64, 30, **change), set[int]()
    state, given = initial_state(recipe, CLASSES, GPU), batches(recipe, 30)
    sync_points.EVERY_S = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: seen.add(state.step)
        torch.cuda.set_sync_debug_mode("warn")
        execution = ExecutionConfig(log_every_steps=10, compile=compiled)
        hooks = [Hook(15, lambda state: None)]
        train(state, iter(given), recipe, execution, World(device=GPU), report=lambda *_: None, hooks=hooks)
        torch.cuda.set_sync_debug_mode("default")
    between = sorted(step for step in seen if step > 1 and step % 10 and step % 15)
    return f"at {between}" if between else "none"


def skips_exactly(optimizer: str) -> bool:
    """Whether steps 1, 5 and 6, whose losses are not numbers, leave weights, averages and moments bit for bit as they were."""
    recipe = recipe_for("ti16", 16, 12, **{"optim.optimizer": optimizer, "average_decay": 0.9})
    state, kept, reported, real = initial_state(recipe, CLASSES, GPU), [], [], loop.example_losses_of

    def planted(network, batch, recipe, classes, step):
        losses, right = real(network, batch, recipe, classes, step)
        return losses * (math.nan if step in (1, 5, 6) else 1), right

    def keep(state):
        moments = [v for each in state.optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
        kept.append([x.detach().clone() for x in (*state.model.parameters(), *state.average.values(), *moments)])

    loop.example_losses_of = planted
    train(
        state,
        iter(batches(recipe, 12)),
        recipe,
        ExecutionConfig(log_every_steps=4),
        World(device=GPU),
        report=lambda step, metrics: reported.append(step) if "guard/nonfinite_steps" in metrics else None,
        hooks=[Hook(1, keep)],
    )
    loop.example_losses_of = real
    same = [number for number, (a, b) in enumerate(itertools.pairwise(kept), 2) if all(map(torch.equal, a, b))]
    return (reported, same) == ([1, 5, 6], [5, 6]) and all(bool(x.isfinite().all()) for x in kept[-1])


def distance_from_cpu() -> float:
    """The largest relative difference of the losses of a network that is trained on both."""
    recipe, curves = recipe_for("ti16", 16, 20, "float32", 64), []
    for device in (torch.device("cpu"), GPU):
        start = initial_state(recipe, CLASSES, torch.device("cpu")).model
        state, metrics = with_optimizer(start.to(device), recipe), dict[int, dict[str, float]]()
        execution, given = ExecutionConfig(log_every_steps=1), iter(batches(recipe, 20))
        train(state, given, recipe, execution, World(device=device), report=metrics.__setitem__)
        curves.append([each["train/loss"] for each in metrics.values()])
    return max(abs(a / b - 1) for a, b in zip(*curves, strict=True))


def memory(variant: str) -> str:
    """Memory of an update with the micro-batch of `auto`, beside its aim and the plan."""
    torch.cuda.empty_cache()
    recipe, world = recipe_for(variant, 100_000, 4), World(device=GPU)
    execution = ExecutionConfig(micro_batch_size="auto", log_every_steps=4)
    state, total = initial_state(recipe, CLASSES, GPU), memory_bytes(GPU)
    chosen = micro_batch_that_fits(state, recipe, execution, world)
    given = [[synthetic_batch(recipe, CLASSES, chosen)] for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    train(state, iter(given), recipe, execution, world, report=lambda *_: None)
    peak, weights = torch.cuda.max_memory_allocated(), sum(p.nbytes for p in state.model.parameters())
    planned = activation_bytes(recipe.model, chosen, bfloat16=True) + 4 * weights
    return f"{variant}: micro-batch {chosen}, {peak / 1e9:.1f} GB, {peak / total:.2f} of the memory; planned {planned / peak:.2f} of it"


if __name__ == "__main__":
    main()
