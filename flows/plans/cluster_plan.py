"""How many nodes to train on: a training as its plan counts it, simulated on 1 to 1,024 nodes. Starts nothing."""

from dataclasses import dataclass
from typing import Any

from vitline.flows.plans.measured_speed import measured_speeds
from vitline.flows.plans.training_cost import bytes_per_image, reading_plan
from vitline.flows.plans.training_plan import checkpoint_bytes
from vitline.infra.html.text import and_list, percent
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.cluster_twin import ClusterRow, ClusterTwin, Workload, twin
from vitline.vit.cost.estimate import PlanGpus, demand_of
from vitline.vit.run.resolved import ResolvedTraining

_FSDP = 1.5
"""FSDP gathers the weights twice and sums the gradients once, where DDP sums only (arXiv:1910.02054, 7.2.2)."""


@dataclass(frozen=True)
class ClusterPlan:
    """The rows for a training, and what they rest on."""

    name: str
    """Of the training."""
    what: str
    """Its network, corpora and steps."""
    work: Workload
    assumed: ClusterAssumptions
    twin: ClusterTwin
    speed: str
    """Where the speed of a worker comes from."""

    def table(self) -> list[dict[str, str]]:
        """The rows as text, by column."""
        return [self._cells(row) for row in self.twin.rows]

    def _cells(self, row: ClusterRow) -> dict[str, str]:
        return {
            "nodes": f"{row.nodes:,}",
            "workers": f"{row.workers:,}",
            "images/s": f"{row.images_per_s:,.0f}",
            "days": _days(row.days),
            "90 % range": f"{_days(row.days_low)} to {_days(row.days_high)}",
            **({} if row.price is None else {"USD": f"{row.price:,.0f}"}),
            "lost work": percent(row.lost),
            "goodput": percent(row.goodput),
            "failures": f"{row.failures:,.1f}",
            "limit": row.limit,
        }

    def sentences(self) -> list[str]:
        """The answer first, then what it rests on."""
        work, assumed, knee, end = self.work, self.assumed, self.twin.knee, self.twin.not_possible
        told = list[str]()
        if knee is not None:
            many = "1 node" if knee.nodes == 1 else f"{knee.nodes:,} nodes"
            told.append(
                f"The knee: {many}, {_days(knee.days)} days. Up to there each doubling makes the training at least "
                f"{1 + assumed.least_gain:g} times as fast."
            )
        if end is not None:
            told.append(f"{end[0]:,} {'node' if end[0] == 1 else 'nodes'}: not possible: {end[1]}")
        if failing := [f"{percent(row.failed)} on {row.nodes:,} nodes" for row in self.twin.rows if row.failed]:
            told.append(
                f"Some runs fail on the way, after {work.max_restarts} restarts from one checkpoint: {and_list(failing)}. Save more often "
                "(execution.save_every_steps)."
            )
        told.append(f"A worker that waits for nothing trains on {work.images_per_s:,.0f} images/s: {self.speed}.")
        told.append(
            "Fixed: after a failure the training waits for the replacement. execution.min_workers makes it elastic."
            if work.min_workers is None
            else f"Elastic: after a failure it goes on with the other nodes, with {work.min_workers:,} workers or more."
        )
        told.append("Simulated, not measured: no cluster of several nodes with GPUs has been compared with it yet.")
        return told

    def to_json(self) -> dict[str, Any]:
        end = self.twin.not_possible
        return {
            "training": self.name,
            "what": self.what,
            "rows": [{**row._asdict(), "lost": row.lost, "goodput": row.goodput} for row in self.twin.rows],
            "knee_nodes": None if self.twin.knee is None else self.twin.knee.nodes,
            "not_possible": None if end is None else {"nodes": end[0], "reason": end[1]},
            "worker_images_per_s": self.work.images_per_s,
            "speed": self.speed,
            "elastic": self.work.min_workers is not None,
            "assumptions": self.assumed.model_dump(),
        }


def _days(number: float) -> str:
    """Three digits: `0.00312`, `1.24`, `312`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def cluster_plan(
    training: ResolvedTraining,
    assumed: ClusterAssumptions,
    gpus: PlanGpus,
    images_per_s: float | None = None,
    *,
    measured: bool = False,
) -> ClusterPlan:
    """Simulates a training; its own number of workers does not matter. Raises ValueError like `reading_plan` and `worker_speed`."""
    from vitline.vit.cost.memory import num_weights
    from vitline.vit.cost.training_memory import trained_weights

    config, corpora = training.config, training.corpora
    recipe, execution = config.recipe, config.execution
    reading_plan(config, corpora)  # refuses what `pretrain run --plan` refuses
    rate, speed = worker_speed(training, gpus, images_per_s, measured)
    weights = num_weights(recipe.model, corpora.num_classes)
    work = Workload(
        total_steps=recipe.total_steps,
        save_every_steps=execution.save_every_steps,
        global_batch_size=recipe.input.global_batch_size,
        num_lanes=recipe.input.num_lanes,
        micro_batch=execution.planned_micro_batch,
        images_per_s=rate,
        decode_threads=execution.decode_threads,
        bytes_per_image=bytes_per_image(config.split, corpora),
        sent_bytes=4 * trained_weights(recipe, weights) * (_FSDP if execution.sharding == "fsdp" else 1),
        checkpoint_bytes=checkpoint_bytes(config, weights),
        overlaps=execution.device != "cpu",
        min_workers=execution.min_workers,
        max_restarts=execution.max_restarts_without_progress,
    )
    what = f"{recipe.model.summary} on {' + '.join(part.title for part in corpora.parts)}, {recipe.total_steps:,} steps of "
    what += f"{recipe.input.global_batch_size:,} images"
    return ClusterPlan(config.name, what, work, assumed, twin(work, assumed), speed)


def worker_speed(
    training: ResolvedTraining, gpus: PlanGpus, images_per_s: float | None, measured: bool
) -> tuple[float, str]:
    """Images per second of a worker, and where they come from. Raises ValueError like `demand_of`, without an earlier run where the
    speed is to be a measured one, and for a training on CPUs of which nothing is known."""
    config, classes = training.config, training.corpora.num_classes
    if measured:
        found = next(measured_speeds(training.root, config), None)
        if images_per_s is not None or found is None:
            raise ValueError(
                "--measured and --images-per-s both give the speed of a worker. Leave one of them out."
                if found
                else f"--measured: below {training.root} there is no finished training of the same network, batch and precision. Give "
                "--images-per-s, or leave it out: --gpu and --mfu then give the speed."
            )
        return found.images_per_s / found.workers, f"measured, with its waits: {found.text(classes)}"
    if images_per_s is None and config.execution.device == "cpu":
        raise ValueError(
            "execution.device=cpu: the speed of a CPU is not known before it was measured. Give --images-per-s, or --measured after a "
            "first training."
        )
    demand = demand_of(config.recipe, classes, gpus, images_per_s)
    return demand.images_per_s, demand.origin if demand.gpu is None else f"{demand.gpu}, {demand.origin}"
