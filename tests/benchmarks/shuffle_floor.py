"""What a weak shuffle costs in accuracy: the floor of `shuffle_report.py`. Command:
python tests/benchmarks/shuffle_floor.py [--seeds 8]

20,000 points of 100 overlapping Gaussian classes in row groups of 20 rows, in random order or sorted by class. A network of
two hidden layers trains on them for 6 epochs in the order of each number of lanes and window. Prints, for each, the class
entropy as a fraction of a perfect shuffle's and the accuracy on 4,000 other points, mean and standard error over the seeds.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from vitline.data_prep.shard_format import SegmentInfo, SplitInfo
from vitline.vit.input.order import Ints, Order

sys.path.insert(0, str(Path(__file__).parent))
from shuffle_report import SmallColumns, shuffle_report

CLASSES, WIDTH, ROWS, GROUP, BATCH, EPOCHS, PEAK_LR = 100, 48, 20_000, 20, 256, 6, 0.1
SORTED = ((128, 4), (128, 2), (64, 4), (32, 8), (64, 3), (128, 1), (64, 2), (32, 4), (64, 1), (32, 2), (32, 1))


class InMemory(SmallColumns):
    """Columns of rows that no store holds."""

    def __init__(self, labels: np.ndarray) -> None:
        ids = [f"{row:06d}" for row in range(len(labels))]
        self._table = pa.table({"labels": labels[:, None].tolist(), "example_id": ids, "source": ["made"] * len(ids)})
        self._last = None

    def _tables(self, row_groups):
        return (self._table.slice(group * GROUP, GROUP) for group in row_groups)


def order_of(lanes: int, window: int, seed: int) -> Order:
    segment = SegmentInfo(split="train", name="s000", num_rows=ROWS, num_shards=1)
    split = SplitInfo(
        num_rows=ROWS, rows_per_row_group=GROUP, row_groups_per_shard=ROWS, segments=(segment,), digest=""
    )
    return Order(split, corpus_digest="d", seed=seed, global_batch_size=BATCH, num_lanes=lanes, shuffle_window=window)


def accuracy(
    order: Order, seed: int, x: torch.Tensor, y: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor]
) -> float:
    torch.manual_seed(seed)
    hidden = [torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, 128), torch.nn.GELU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LR, momentum=0.9)
    steps = EPOCHS * ROWS // BATCH
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        rows = torch.from_numpy(order.locate(order.slots(step)).row)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    draws = np.random.default_rng(0)
    means = 0.55 * draws.normal(size=(CLASSES, WIDTH))

    def points(number: int) -> tuple[Ints, torch.Tensor]:
        labels = draws.integers(0, CLASSES, number)
        return labels, torch.tensor(means[labels] + draws.normal(size=(number, WIDTH)), dtype=torch.float32)

    (labels, x), (test_labels, test_x) = points(ROWS), points(4000)
    test = (test_x, torch.from_numpy(test_labels))
    for name, by, chosen in (
        ("random", draws.permutation(ROWS), SORTED[:1]),
        ("sorted", np.argsort(labels, kind="stable"), SORTED),
    ):
        columns = InMemory(labels[by])
        for lanes, window in chosen:
            orders = [order_of(lanes, window, seed) for seed in range(seeds)]
            data = x[by], torch.from_numpy(labels[by])
            found = [100 * accuracy(order, seed, *data, test) for seed, order in enumerate(orders)]
            fraction = np.mean([shuffle_report(order, columns).entropy_fraction for order in orders])
            error = np.std(found, ddof=1) / seeds**0.5
            print(
                f"| {name} | {lanes} | {window} | {100 * fraction:.1f} % | {np.mean(found):.2f} ± {error:.2f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
