"""Whole updates of our training loop beside timm's network in the loop of timm's train script, on the GPU that is there.

    .venv/bin/python tests/benchmarks/gpu.py [--rounds 7] [--steps 20] [--batch 256] [b16 l16 h14]

Both compute the same function in bfloat16, compiled, on the same bytes from pinned memory, which they normalise on the device, with
softmax cross-entropy, gradients clipped to norm 1 and AdamW. timm runs with the best flags of its train.py: `--amp
--amp-dtype bfloat16 --channels-last --torchcompile inductor --clip-grad 1`, fused AdamW. Rounds are interleaved; a round is
`--steps` updates between two waits for the device. Bars: B/16 at 45 % MFU of the vendor's peak; the lower end of the interval of
peer over ours at least 1. Without a GPU the program runs, with `--batch 4 --steps 1 ti16`, to check itself.

Also prints the kernels of one uncompiled update of ours and the waits for the device within it, as torch's profiler counts them.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from models import CLASSES, declare_torchvision, interval, timm_network

from vit.config import ExecutionConfig
from vit.models.flops import forward_flops
from vit.models.variants import network_variant
from vit.speed.step_time import synthetic_batch
from vit.speed.throughput import recipe_of, step_of
from vit.training.timing.device_peak import peak_flops
from vit.training.train import initial_state, set_tf32, wrap
from vit.training.world import World

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["b16", "l16", "h14"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak, source = peak_flops(device, "bfloat16")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, peak {peak / 1e12:.1f} TFLOP/s ({source})" if peak else name)
    declare_torchvision()
    set_tf32(True)
    for variant in asked.variants:
        compare(variant, device, peak, asked)


def compare(variant: str, device: torch.device, peak: float | None, asked: argparse.Namespace) -> None:
    config = network_variant(variant)
    state = initial_state(recipe_of(config, "bfloat16", asked.batch), CLASSES, device)
    loops = {"timm": timm_loop(state.model, asked.batch, device)}  # before ours has moved its weights
    update = step_of(state, "training", "bfloat16", asked.batch, device)
    print(f"\n{variant}, {asked.batch} images: {trace(update, device)}")
    wrap(state.model, ExecutionConfig(compile=True), World(device=device))
    loops["ours"] = update
    rates = {name: list[float]() for name in loops}
    for name, update in loops.items():
        start = time.perf_counter()
        for _ in range(WARM_UP):
            float(update())
        print(f"  {name}: compiled and warm after {time.perf_counter() - start:.0f} s", flush=True)
    for turn in range(asked.rounds):
        for name in random.Random(turn).sample(list(loops), len(loops)):
            start = time.perf_counter()
            for _ in range(asked.steps):
                last = loops[name]()
            float(last)
            rates[name].append(asked.steps * asked.batch / (time.perf_counter() - start))
    per_image = 3 * forward_flops(config, CLASSES)
    for name, found in rates.items():
        middle = statistics.median(found)
        mfu = f", MFU {100 * middle * per_image / peak:.1f} %" if peak else ""
        print(f"  {name}: {middle:.1f} images/s{mfu}; runs {json.dumps([round(rate, 2) for rate in found])}")
    low, high = interval([ours / theirs for ours, theirs in zip(rates["ours"], rates["timm"], strict=True)])
    print(f"  ours over timm: [{low:.3f}, {high:.3f}]", flush=True)


def timm_loop(ours, batch_size: int, device: torch.device):
    """An update as in timm's train.py, as a function that queues it and returns the gradient norm."""
    model = timm_network(ours.cpu()).to(device=device, memory_format=torch.channels_last).train()
    ours.to(device)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    batch = synthetic_batch(recipe_of(ours.config, "bfloat16", batch_size), CLASSES, batch_size)
    images, labels = batch.images.permute(0, 3, 1, 2).contiguous(), batch.labels
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    compiled = torch.compile(model, backend="inductor")

    def update():
        pixels = images.to(device, non_blocking=True).float().sub_(127.5).div_(127.5)
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(pixels.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, labels.to(device, non_blocking=True))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update


def trace(update, device: torch.device) -> str:
    """What one uncompiled update asks of the GPU."""
    if device.type != "cuda":
        return "no GPU, so nothing is traced; `tests/vit/training/test_host_waits.py` counts waits without one"
    float(update())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        update()
    counts = {event.key: event.count for event in profiled.key_averages()}
    launches = sum(count for name, count in counts.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    waits = sum(
        count for name, count in counts.items() if name in ("cudaStreamSynchronize", "aten::_local_scalar_dense")
    )
    return f"{launches} kernels launched and {waits} waits for the device in an uncompiled update"


if __name__ == "__main__":
    main()
