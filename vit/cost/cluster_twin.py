"""A training on 1, 2, 4 ... nodes as a discrete-event simulation: days, lost work, and how many nodes are worth their price.

Numbers in, numbers out: nothing is read or measured here. Between two events the steps go on in blocks from one checkpoint to the next,
which are summed, so a row takes milliseconds however long the training is.

- A step takes the slowest rank's computation, what the gradient all-reduce adds to it, or the time of its input, whichever is longer.
- A save holds the steps for a moment; a thread writes the checkpoint while they go on, and the next save waits for it (`vit/checkpoints`).
- A failure takes a node away and loses all steps since the newest whole checkpoint. Its workers start again: all of them once a
  replacement is there, or, elastic, at once with fewer, and grow after the first checkpoint that follows the replacement.
- Failures are a Poisson process, also while workers start. Without scatter and with a write that takes no time this is the model of
  Young (CACM 17:9, 1974) and Daly (Future Generation Computer Systems 22:3, 2006), with which the tests compare it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, inf, log, log2, sqrt
from random import Random
from statistics import NormalDist, fmean, median, quantiles, stdev
from typing import Literal, NamedTuple, get_args

from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.input.plan import check_world_size

MOST_NODES = 1024
Limit = Literal["compute", "network", "decode", "store"]
Part = Literal["steps", "slowest rank", "network", "input", "saves", "lost work", "starts and waits"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Where the time goes: steps of ranks that are all alike and wait for nothing; waits for the slowest rank, for gradients of other nodes and
for batches; steps that are held by saves; steps that are computed again; no steps at all."""
KEPT: tuple[Part, ...] = ("steps", "slowest rank", "network", "input")
"""The time of steps whose updates stay: the goodput is their share."""
MOST_FAILURES = 1_000
"""After so many a simulation counts as failed. Llama 3 405B had 466 interruptions in 54 days."""
_DAY_S, _BACKWARD, _POINTS, _FIRST = 86_400.0, 2 / 3, 512, 20


@dataclass(frozen=True)
class Workload:
    """A training, as its plan counts it. Bytes and rates are of one image or worker unless they say otherwise."""

    total_steps: int
    save_every_steps: int
    global_batch_size: int
    num_lanes: int
    micro_batch: int
    images_per_s: float
    """Of a worker that waits for nothing."""
    decode_threads: int
    bytes_per_image: float
    sent_bytes: float
    """What all ranks sum in a step: gradients, and with FSDP the weights that it gathers."""
    checkpoint_bytes: float
    overlaps: bool
    """Whether gradients are sent while others are computed, as DDP does."""
    min_workers: int | None
    """Of an elastic training."""
    max_restarts: int
    """`execution.max_restarts_without_progress`."""

    def fewest_nodes(self, nodes: int, gpus_per_node: int) -> int:
        """With which a training of so many nodes goes on."""
        return nodes if self.min_workers is None else min(nodes, ceil(self.min_workers / gpus_per_node))


class StepTime(NamedTuple):
    """Seconds of a mean step, by what they are spent on, and their standard deviation."""

    compute_s: float
    slowest_s: float
    network_s: float
    input_s: float
    deviation_s: float
    limit: Limit
    """What would shorten the step most if it were a little faster."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.slowest_s + self.network_s + self.input_s


@functools.cache
def slowest_of(ranks: int, scatter: float) -> tuple[float, float]:
    """Mean and standard deviation of the largest of so many log-normal numbers with mean 1 and standard deviation `scatter`, by their
    quantiles."""
    spread, normal = sqrt(log(1 + scatter**2)), NormalDist()
    at = (((i + 0.5) / _POINTS) ** (1 / ranks) for i in range(_POINTS))
    largest = [exp(spread * normal.inv_cdf(share) - spread**2 / 2) for share in at]
    return max(1.0, fmean(largest)), stdev(largest)


def step_time(work: Workload, assumed: ClusterAssumptions, nodes: int) -> StepTime:
    """The time of a step on so many nodes. Raises ValueError for more workers than lanes.

    A rank serves whole lanes, and a batch has equally many images of each, so the busiest rank has more than the mean where lanes do
    not divide evenly. An all-reduce sends each gradient twice, but for what a node has itself (Patarasuk and Yuan, J. Parallel Distrib.
    Comput. 69:2, 2009), and takes the latency of two ways through a tree of nodes (Sanders et al., Parallel Computing 35:12, 2009). What
    the backward pass of the last micro-batch takes hides it. Inside a node it costs nothing here.
    """
    ranks, batch = nodes * assumed.gpus_per_node, work.global_batch_size
    check_world_size(ranks, work.num_lanes)  # as each lane has an image of each batch, so has each rank
    busiest = ceil(work.num_lanes / ranks) * batch / work.num_lanes
    alike, of_slow_node = (slowest_of(many, assumed.step_scatter) for many in (ranks, assumed.gpus_per_node))
    factor, deviation = max(alike, tuple(each / assumed.slow_node_speed for each in of_slow_node))
    compute = batch / ranks / work.images_per_s
    slowest = busiest / work.images_per_s * factor
    last = (busiest - 1) % work.micro_batch + 1
    hidden = _BACKWARD * last / work.images_per_s if work.overlaps else 0.0
    sent = 2 * ceil(log2(nodes)) * assumed.link_latency_s
    sent += 2 * (nodes - 1) / nodes * work.sent_bytes / assumed.link_bytes_per_s
    network = max(0.0, sent - hidden)
    decode = busiest / (work.decode_threads * assumed.decode_images_per_core_s * assumed.slow_node_speed)
    store = batch * work.bytes_per_image * _per_byte(assumed, nodes)
    waits = max(0.0, max(decode, store) - slowest - network)
    if waits:
        limit: Limit = "decode" if decode >= store else "store"
    else:
        limit = "network" if sent > max(hidden, slowest - hidden) else "compute"
    deviation = 0.0 if waits else deviation * busiest / work.images_per_s
    return StepTime(compute, slowest - compute, network, waits, deviation, limit)


def _per_byte(assumed: ClusterAssumptions, nodes: int) -> float:
    """Seconds for a byte between the store and nodes that share the work."""
    return max(1 / (nodes * assumed.store_node_bytes_per_s), 1 / assumed.store_bytes_per_s)


@dataclass(frozen=True)
class Stretch:
    """Steps from a start of the workers to the end of the training, as far as nothing interrupts them. Blocks end with a save."""

    began: float
    steps: int
    block_steps: int
    step_s: float
    stall_s: float
    write_s: float

    @property
    def blocks(self) -> int:
        return ceil(self.steps / self.block_steps)

    def steps_in(self, blocks: int) -> int:
        return min(self.steps, blocks * self.block_steps)

    @property
    def _pitch(self) -> float:
        """Seconds from one save to the next, which waits until the one before is written."""
        return max(self.block_steps * self.step_s, self.write_s) + self.stall_s

    def saved(self, block: int) -> float:
        """When the save of a block has let go of the steps; of block 0 the start."""
        if block == 0:
            return self.began
        seconds = (self.steps_in(block) - self.steps_in(block - 1)) * self.step_s
        if block == 1:
            return self.began + seconds + self.stall_s
        first = self.began + self.block_steps * self.step_s + self.stall_s
        return first + (block - 2) * self._pitch + max(seconds, self.write_s) + self.stall_s

    def whole(self, block: int) -> float:
        """When the checkpoint of a block is in the store; that of the last block ends the training."""
        return self.saved(block) + self.write_s

    def blocks_at(self, time: float) -> int:
        """Blocks whose checkpoint is in the store at a time before the end."""
        first = self.whole(1)
        return 0 if time < first else min(self.blocks - 1, int((time - first) // self._pitch) + 1)


class Simulated(NamedTuple):
    """One simulation: seconds by what they were spent on, and failures. `ended` is False where the run failed on the way."""

    parts: dict[Part, float]
    failures: int
    ended: bool

    @property
    def wall_s(self) -> float:
        return sum(self.parts.values())


def simulate(work: Workload, assumed: ClusterAssumptions, nodes: int, random: Random) -> Simulated:
    """One training on so many nodes, from its first start to its last checkpoint. Raises ValueError like `step_time`.

    A run fails as in vitline, at the start after `max_restarts` restarts from one checkpoint, or after `MOST_FAILURES` failures.
    """
    parts, failures, starts = dict.fromkeys(PARTS, 0.0), 0, 0
    now, done = 0.0, 0  # seconds; steps in the newest checkpoint
    returns = list[float]()  # when missing nodes are replaced
    may_miss = nodes - work.fewest_nodes(nodes, assumed.gpus_per_node)
    rate = assumed.failures_per_node_day / _DAY_S
    write_s = work.checkpoint_bytes * _per_byte(assumed, nodes)

    def failure_after(time: float, alive: int) -> float:
        return time + random.expovariate(alive * rate) if alive * rate else inf

    while True:
        returns = sorted(time for time in returns if time > now)
        enough = returns[-1 - may_miss] if len(returns) > may_miss else now
        ready, failure = enough + assumed.start_s, failure_after(now, nodes - len(returns))
        parts["starts and waits"] += min(ready, failure) - now
        now = min(ready, failure)
        if failure < ready and failures <= MOST_FAILURES:
            failures += 1
            returns.append(now + assumed.replacement_s)
            continue
        if starts > work.max_restarts or failures > MOST_FAILURES:
            return Simulated(parts, failures, ended=False)
        starts += 1
        returns = [time for time in returns if time > now]
        alive, left = nodes - len(returns), work.total_steps - done
        each = step_time(work, assumed, alive)
        drawn = max(each.step_s + each.deviation_s / sqrt(left) * random.gauss(), each.step_s / 2)
        stretch = Stretch(now, left, work.save_every_steps, drawn, assumed.save_stall_s, write_s)
        failure, grows_after = failure_after(now, alive), stretch.blocks
        if returns:  # elastic: the first checkpoint after a replacement
            grows_after = min(stretch.blocks, stretch.blocks_at(min(returns)) + 1)
        stop = min(failure, stretch.whole(grows_after))
        kept = grows_after if stop < failure else stretch.blocks_at(failure)
        steps, held = stretch.steps_in(kept), stretch.saved(kept)
        parts["steps"] += steps * each.compute_s
        parts["network"] += steps * each.network_s
        parts["input"] += steps * each.input_s
        parts["slowest rank"] += steps * (drawn - each.compute_s - each.network_s - each.input_s)
        parts["saves"] += held - now - steps * drawn
        if kept == stretch.blocks:
            parts["saves"] += stop - held
            return Simulated(parts, failures, ended=True)
        parts["lost work"] += stop - held
        now, done, starts = stop, done + steps, 0 if kept else starts
        if stop == failure:
            failures += 1
            returns.append(now + assumed.replacement_s)


class ClusterRow(NamedTuple):
    """A training on so many nodes. Shares are of the wall time of all simulations together."""

    nodes: int
    workers: int
    images_per_s: float
    """While it trains."""
    limit: Limit
    days: float
    """Median."""
    days_low: float
    days_high: float
    """The range of 90 % of the simulations."""
    price: float | None
    failures: float
    """Mean number."""
    failed: float
    """Share of the simulations that do not come to the end; the others make the figures."""
    shares: dict[Part, float]

    @property
    def lost(self) -> float:
        return self.shares["lost work"]

    @property
    def goodput(self) -> float:
        return sum(self.shares[part] for part in KEPT)


class ClusterTwin(NamedTuple):
    """All rows, the knee, and why there are no more rows."""

    rows: Sequence[ClusterRow]
    knee: ClusterRow | None
    not_possible: tuple[int, str] | None
    """Nodes, and the reason."""


def twin(work: Workload, assumed: ClusterAssumptions) -> ClusterTwin:
    """Simulates 1, 2, 4 ... up to 1,024 nodes. Equal arguments give equal results."""
    rows, not_possible, nodes = list[ClusterRow](), None, 1
    while nodes <= MOST_NODES and not_possible is None:
        try:
            rows.append(row_of(work, assumed, nodes))
        except ValueError as error:
            not_possible = nodes, str(error)
        nodes *= 2
    return ClusterTwin(rows, knee_of(rows, assumed.least_gain), not_possible)


def row_of(work: Workload, assumed: ClusterAssumptions, nodes: int) -> ClusterRow:
    """Raises ValueError like `step_time`, and where most runs would fail on the way."""
    each, random, found = step_time(work, assumed, nodes), Random(f"cluster twin {nodes}"), list[Simulated]()
    for _ in range(assumed.repetitions):
        found.append(simulate(work, assumed, nodes, random))
        failed = sum(not one.ended for one in found)
        if len(found) >= _FIRST and failed > len(found) // 2:
            every, block = _DAY_S / nodes / assumed.failures_per_node_day, work.save_every_steps * each.step_s
            raise ValueError(
                f"{failed} of {len(found)} simulations fail on the way: a node fails every {every:,.0f} s in the mean, the steps between "
                f"two checkpoints take {block:,.0f} s, and a run ends after {work.max_restarts} restarts from one checkpoint, here also "
                f"after {MOST_FAILURES:,} failures. Save more often (execution.save_every_steps={work.save_every_steps})."
            )
    ended = [one for one in found if one.ended]
    days, total = [one.wall_s / _DAY_S for one in ended], sum(one.wall_s for one in ended)
    price = assumed.node_hour_price
    twentieths = quantiles(days, n=20, method="inclusive")
    return ClusterRow(
        nodes=nodes,
        workers=nodes * assumed.gpus_per_node,
        images_per_s=work.global_batch_size / each.step_s,
        limit=each.limit,
        days=median(days),
        days_low=twentieths[0],
        days_high=twentieths[-1],
        price=None if price is None else 24 * nodes * price * median(days),
        failures=fmean(one.failures for one in ended),
        failed=failed / len(found),
        shares={part: sum(one.parts[part] for one in ended) / total for part in PARTS},
    )


def knee_of(rows: Sequence[ClusterRow], least_gain: float) -> ClusterRow | None:
    """The most nodes up to which each doubling makes the training at least 1 + `least_gain` times as fast; None without rows."""
    knee = rows[0] if rows else None
    for fewer, more in pairwise(rows):
        if fewer.days < (1 + least_gain) * more.days:
            break
        knee = more
    return knee
