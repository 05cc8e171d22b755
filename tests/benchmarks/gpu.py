"""Whole updates of our training loop beside timm's network in the loop of timm's train script, on the GPU that is there.

    .venv/bin/python tests/benchmarks/gpu.py [--rounds 7] [--steps 20] [--at-once 2] [b16:256 l16:128 h14:64]

Networks with the number of images of an update. Both loops compute the same function in bfloat16, compiled, on the same bytes, which
they normalise on the device, with softmax cross-entropy, gradients clipped to norm 1 and AdamW. timm runs with the best flags of its
train.py: `--amp --amp-dtype bfloat16 --channels-last --torchcompile inductor --clip-grad 1`, fused AdamW, bytes from pinned memory.
Each loop has a process of its own: `--at-once` of them compile side by side, then they are timed in turns, in a random order. A round
is `--steps` updates between two waits for the device, after two of warming up. Bars: B/16 at 45 % MFU of the maker's peak; the lower
end of the interval of ours over timm at least 1.

Also prints, from torch's profiler, the launches and waits of an update, and `--kernels` kernels that take most of its time. Without a
GPU the program runs, with `--steps 1 ti16:4`, to check itself.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from models import CLASSES, declare_torchvision, interval, timm_network

from vitline.vit.config import ExecutionConfig
from vitline.vit.cost.step_time import synthetic_batch
from vitline.vit.cost.throughput import recipe_of, step_of
from vitline.vit.models.flops import forward_flops
from vitline.vit.models.variants import network_variant
from vitline.vit.training.loop import initial_state
from vitline.vit.training.parallel import set_tf32, wrap
from vitline.vit.training.timing.device_peak import peak_flops
from vitline.vit.training.world import World

LOOPS = ("timm", "ours")
WARM_UP = 3
PROFILED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["b16:256", "l16:128", "h14:64"], metavar="NETWORK:IMAGES")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--kernels", type=int, default=0)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak, source = peak_flops(device, "bfloat16")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, peak {peak / 1e12:.1f} TFLOP/s ({source})" if peak else name)
    pairs = [(network, loop) for network in asked.networks for loop in LOOPS]
    running = start(pairs, asked)
    for network in asked.networks:
        if all((network, loop) in running for loop in LOOPS):
            compare(network, {loop: running[network, loop] for loop in LOOPS}, peak, asked)
    for channel in running.values():
        channel.send("end")


def start(pairs: list[tuple[str, str]], asked: argparse.Namespace) -> dict[tuple[str, str], Connection]:
    """A process for each network and loop, of which so many compile at once; those that could start, warm and ready to be timed."""
    spawn, waiting, channels, ready = multiprocessing.get_context("spawn"), list(pairs), {}, {}
    while waiting or channels:
        while waiting and len(channels) < asked.at_once:
            here, there = spawn.Pipe()
            spawn.Process(target=serve, args=(there, *waiting[0], asked.steps)).start()
            there.close()
            channels[here] = waiting.pop(0)
        for channel in multiprocessing.connection.wait(list(channels)):
            network, loop = pair = channels.pop(channel)
            try:
                print(f"  {network} {loop}: {channel.recv()}", flush=True)
                ready[pair] = channel
            except EOFError:
                print(f"  {network} {loop}: ended before it was ready", flush=True)
    return ready


def compare(network: str, channels: dict[str, Connection], peak: float | None, asked: argparse.Namespace) -> None:
    variant, batch = network.split(":")
    rates = {loop: list[float]() for loop in channels}
    for turn in range(asked.rounds):
        for loop in random.Random(turn).sample(list(channels), len(channels)):
            rates[loop].append(int(batch) * asked.steps / answer(channels[loop], "time"))
    per_image = 3 * forward_flops(network_variant(variant), CLASSES)
    print(f"\n{variant}, {batch} images:")
    for loop, found in rates.items():
        middle = statistics.median(found)
        mfu = f", MFU {100 * middle * per_image / peak:.1f} %" if peak else ""
        print(f"  {loop}: {middle:.1f} images/s{mfu}; runs {json.dumps([round(rate, 1) for rate in found])}")
    low, high = interval([ours / theirs for ours, theirs in zip(rates["ours"], rates["timm"], strict=True)])
    print(f"  ours over timm: [{low:.3f}, {high:.3f}]")
    for loop in channels:
        launches, waits, total_ms, kernels = answer(channels[loop], "trace")
        print(f"  {loop}: {launches} kernels launched, {waits} waits, {total_ms:.2f} ms of kernels in an update")
        for ms, count, kernel in kernels[: asked.kernels]:
            print(f"    {ms:7.3f} ms {count:5d} x {kernel}")
    sys.stdout.flush()


def answer(channel: Connection, question: str):
    channel.send(question)
    return channel.recv()


def serve(channel: Connection, network: str, loop: str, steps: int) -> None:
    """Builds, compiles and warms up one loop; then times or traces it whenever it is asked. Between questions it holds no activations."""
    with redirect_stdout(sys.stderr):
        declare_torchvision()
        set_tf32(True)
        variant, batch = network.split(":")
        device, config = torch.device("cuda" if torch.cuda.is_available() else "cpu"), network_variant(variant)
        start = time.perf_counter()
        state = initial_state(recipe_of(config, "bfloat16", int(batch)), CLASSES, device)
        if loop == "timm":
            update = timm_loop(state.model, int(batch), device)
        else:
            wrap(state.model, ExecutionConfig(compile=True), World(device=device))
            update = step_of(state, "training", "bfloat16", int(batch), device)
        for _ in range(WARM_UP):
            float(update())
        peak = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most" if device.type == "cuda" else ""
        ready = f"built, compiled and warm after {time.perf_counter() - start:.0f} s{peak}"
        while True:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            channel.send(ready)
            question = channel.recv()
            if question == "end":
                return
            ready = timed(update, steps) if question == "time" else trace(update)


def timed(update, steps: int) -> float:
    """Seconds of so many updates."""
    for _ in range(2):
        float(update())
    start = time.perf_counter()
    for _ in range(steps):
        last = update()
    float(last)
    return time.perf_counter() - start


def trace(update) -> tuple[int, int, float, list[tuple[float, int, str]]]:
    """Of an update: launches, waits for the device, milliseconds of its kernels, and the kernels that take longest; zeros on a CPU."""
    float(update())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            last = update()
    float(last)
    events, counts = profiled.key_averages(), Counter[str]()
    for event in events:
        counts[event.key] += event.count
    launches = sum(n for name, n in counts.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    waits = counts["cudaStreamSynchronize"] + counts["aten::_local_scalar_dense"]
    on_gpu = [
        e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.key.startswith("Optimizer")
    ]
    kernels = sorted(
        ((e.self_device_time_total / 1e3 / PROFILED, e.count // PROFILED, e.key[:100]) for e in on_gpu), reverse=True
    )
    return launches // PROFILED, waits // PROFILED, sum(ms for ms, *_ in kernels), kernels


def timm_loop(ours, batch_size: int, device: torch.device):
    """An update as in timm's train.py, as a function that queues it and returns the gradient norm."""
    model = timm_network(ours.cpu()).to(device=device, memory_format=torch.channels_last).train()
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


if __name__ == "__main__":
    main()
