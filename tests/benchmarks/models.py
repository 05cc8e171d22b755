"""Our Vision Transformer against timm's and transformers', eager, on one CPU core: forward, and forward with backward.

    .venv/bin/python tests/benchmarks/models.py [--rounds 7] [--batch 4] [s16 b16]

All three compute the same function with the same weights (tanh GELU), checked first. Rounds are interleaved; CPU-seconds
of one thread count, so that other work on the machine matters little. A bar is met where the lower end of the interval
of peer over ours is at least 0.95. Peak memory is that of a process of its own that does three steps.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from vitline.vit.models.build import build_network
from vitline.vit.models.variants import network_variant

IMPLEMENTATIONS = ("ours", "timm", "transformers")
CLASSES = 1000
_LIBRARIES = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["s16", "b16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    declare_torchvision()
    if asked.memory_of:
        print(peak_memory(*json.loads(asked.memory_of)))
        return
    print(f"torch {torch.__version__}, one thread, batch {asked.batch}, {asked.rounds} interleaved rounds")
    for variant in asked.variants:
        networks = {name: make(name, variant) for name in IMPLEMENTATIONS}
        check_equal(networks)
        for precision in ("float32", "bfloat16"):
            for mode in ("forward", "training"):
                compare(variant, networks, precision, mode, asked)


def declare_torchvision() -> None:
    """The peers import torchvision, whose compiled operators do not load beside the CPU build of torch."""
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def make(name: str, variant: str) -> torch.nn.Module:
    """The network of an implementation, with weights drawn from one seed."""
    torch.manual_seed(0)
    config = network_variant(variant)
    ours = build_network(config, CLASSES)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if name == "ours":
        return ours
    if name == "timm":
        return timm_network(ours)
    import tempfile

    from transformers import ViTForImageClassification

    from vitline.vit.convert.huggingface import write_huggingface

    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(ours, folder, [f"class {i}" for i in range(CLASSES)])
        return Logits(ViTForImageClassification.from_pretrained(folder, attn_implementation="sdpa"))


class Logits(torch.nn.Module):
    """transformers' answer as a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).logits


def timm_network(ours) -> torch.nn.Module:
    import timm

    from vitline.vit.convert.timm import to_timm

    arguments, state = to_timm(ours)
    model = timm.create_model(**arguments)
    model.load_state_dict(state, strict=True)
    return model


def check_equal(networks) -> None:
    images = torch.rand(1, 3, 224, 224) * 2 - 1
    with torch.inference_mode():
        logits = {name: network.eval()(images) for name, network in networks.items()}
    for name, value in logits.items():
        difference = float((value - logits["ours"]).abs().max() / logits["ours"].abs().max())
        assert difference < 1e-4, f"{name} computes something else: {difference:.1e}"


def step(network, images, labels, precision: str, mode: str) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        if mode == "forward":
            with torch.inference_mode():
                network(images)
            return
        loss = F.cross_entropy(network(images).float(), labels)
    loss.backward()
    network.zero_grad(set_to_none=True)


def compare(variant, networks, precision, mode, asked) -> None:
    images, labels = torch.rand(asked.batch, 3, 224, 224) * 2 - 1, torch.arange(asked.batch)
    seconds = {name: [] for name in networks}
    for turn in range(asked.rounds + 1):
        for name in random.Random(turn).sample(list(networks), len(networks)):
            network = networks[name].train(mode == "training")
            start = time.process_time()
            step(network, images, labels, precision, mode)
            if turn:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    fastest = min((n for n in networks if n != "ours"), key=lambda n: statistics.median(seconds[n]))
    print(f"\n{variant} {precision} {mode}")
    for name, runs in seconds.items():
        memory = subprocess.run(
            [sys.executable, __file__, "--memory-of", json.dumps([name, variant, precision, mode, asked.batch])],
            capture_output=True, text=True, check=True, env=os.environ,
        ).stdout.split()[-1]  # fmt: skip
        ratios = sorted(theirs / ours for theirs, ours in zip(runs, seconds["ours"], strict=True))
        low, high = interval(ratios)
        print(
            f"  {name:13} {asked.batch / statistics.median(runs):7.2f} images/s, peak {int(memory) / 2**20:6.0f} MiB, "
            f"time over ours {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]{' (fastest peer)' * (name == fastest)}; "
            f"seconds {' '.join(f'{s:.2f}' for s in runs)}",
            flush=True,
        )


def interval(values) -> tuple[float, float]:
    """95 % of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def peak_memory(name: str, variant: str, precision: str, mode: str, batch: int) -> int:
    """Bytes of the weights and of what three steps add to the process at their peak (Linux)."""
    network = make(name, variant).train(mode == "training")
    images, labels = torch.rand(batch, 3, 224, 224) * 2 - 1, torch.arange(batch)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what building the networks has freed would hide what steps take
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    for _ in range(3):
        step(network, images, labels, precision, mode)
    return resident("VmHWM") - before + sum(4 * p.numel() for p in network.parameters())


def resident(field: str) -> int:
    """A figure of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
