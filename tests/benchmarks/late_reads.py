"""Gaps between batches from S3 where some reads are late, with second requests for late reads and without. Command:
python tests/benchmarks/late_reads.py [--rounds 3] [--faults "slow bytes"] [--every 20] [--latency-ms 20]

A SeaweedFS of its own, and the proxy in a process of its own. 16 lanes of 2 row groups of 64 images of 16 px, B = 256, small enough that
decoding takes no time; 16 batches an epoch, two epochs a turn. The consumer takes a batch every `--step-ms`. In each round with and
without second requests, in turns. Every N-th request suffers the faults in turn; of "slow bytes" half of the body comes 5 s late.
Prints the first batch, the largest gap over the median, how many steps were late by more than a tenth of a step, and the requests.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from unittest.mock import patch

from distant_s3 import distant_s3
from steady_stream import small_picture, write_corpus

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import Store, open_store
from vitline.infra.stores import hedged_reads, s3_store
from vitline.vit.input.batches import LoaderResources, train_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

LANES, WINDOW, BATCH, NUM_ROWS, EPOCHS = 16, 2, 256, 4096, 2
RECIPE = InputConfig(
    global_batch_size=BATCH, num_lanes=LANES, shuffle_window=WINDOW, augment=AugmentConfig(image_size_px=16)
)


def gaps_of(store: Store, manifest: Manifest, step_s: float) -> tuple[float, list[float]]:
    """Seconds until the first batch, and of each further step, the wait for its batch among them."""
    began, gaps = time.perf_counter(), list[float]()
    num_steps = EPOCHS * NUM_ROWS // BATCH
    with train_batches(
        store,
        manifest,
        "train",
        RECIPE,
        seed=0,
        micro_batch_size=BATCH,
        num_steps=num_steps,
        loading=LoaderResources(threads=1, read_ahead_bytes=2**30),
    ) as batches:
        for _ in range(num_steps):
            next(batches)
            gaps.append(time.perf_counter() - began)
            time.sleep(step_s)
            began += gaps[-1]
    return gaps[0], gaps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", default=["slow bytes"])
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--step-ms", type=float, default=250)
    given = parser.parse_args()
    with distant_s3(0.0) as (root, proxy):
        store = open_store(f"{root}/late")
        manifest = write_corpus(store, NUM_ROWS, small_picture())
        print(f"faults {given.faults}, every {given.every}th request; a step of {given.step_ms:.0f} ms", flush=True)
        proxy.change(latency_s=given.latency_ms / 1e3, faults=tuple(given.faults), every=given.every)
        for number in range(given.rounds):
            for second in sorted((True, False), reverse=number % 2 == 1):
                s3_store.hedged_reads.cache_clear()
                before = sum(proxy.change().values())
                with ExitStack() as without:
                    if not second:
                        for name in ("_BURST", "_SHARE"):
                            without.enter_context(patch.object(hedged_reads, name, 0.0))
                    first, gaps = gaps_of(store, manifest, given.step_ms / 1e3)
                median = statistics.median(gaps)
                late = sum(gap > 1.1 * median for gap in gaps)
                print(
                    f"round {number}, {'with' if second else 'without'} second requests: first batch after {first:.1f} s, largest "
                    f"gap {max(gaps):.2f} s = {max(gaps) / median:.1f} x the median, {late} of {len(gaps)} late, "
                    f"{sum(proxy.change().values()) - before} requests",
                    flush=True,
                )


if __name__ == "__main__":
    main()
