"""Whether a pipeline fits its deadline, estimated from earlier trainings of the same network and the last transfer of the pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.catalog.snapshot import RootSnapshot
from vitline.flows.forms.nights import PREFIX as NIGHTS
from vitline.flows.forms.nights import NightSettings
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.forms.requested_protocol import as_for_one
from vitline.flows.plans.measured_speed import measured_speeds
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import hours_of


def known_images_per_s(root: str, training: TrainConfig) -> float | None:
    """Throughput of the newest finished or paused training of the same network, batch and number of workers."""
    workers = training.execution.num_workers
    speeds = measured_speeds(root, training)
    return next((speed.images_per_s for speed in speeds if speed.config.execution.num_workers == workers), None)


_TRANSFER = ("name", "tasks", "protocol", "from_scratch", "recipe", "overrides")
"""The fields of a request that decide how long its transfer takes."""


def known_transfer_hours(root: str, plan: PipelinePlan) -> dict[str, float]:
    """How long the model of one seed was evaluated by each protocol, in the newest pipeline that requested the same and found no part of
    it done; without the protocols of which there is none."""
    with RootSnapshot.read(open_store(root), ["pipeline"]) as snapshot:
        records = sorted(
            (stored.record for stored in snapshot.pipelines.values()), key=lambda record: -record.updated_at
        )
    request = plan.request.model_dump(mode="json")
    took = {protocol: _hours_of(records, request, protocol) for protocol in plan.protocols}
    return {protocol: hours for protocol, hours in took.items() if hours is not None}


def _hours_of(records: Sequence[PipelineRecord], request: Mapping[str, Any], protocol: str) -> float | None:
    requested = _decides(request, protocol)
    for record in records:
        took = [
            stage.wall_s
            for stage in record.stages
            if not record.decided_early
            and stage.stage == "evaluate"
            and (stage.protocol or record.request.get("protocol")) == protocol
            and not (stage.reused or stage.resumed)
        ]
        if took and requested == _decides(record.request, protocol):
            return fmean(took) / 3600
    return None


def _decides(request: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """What decides how long a transfer by one protocol takes."""
    alone = as_for_one(request, protocol)
    alone["overrides"] = {path: value for path, value in alone["overrides"].items() if not path.startswith(NIGHTS)}
    return {name: alone.get(name) for name in _TRANSFER}


@dataclass(frozen=True)
class KnownTransfer:
    """How long the transfer of a pipeline takes, as far as earlier ones have told."""

    hours: float
    by_protocol: Mapping[str, float]
    """Of all seeds."""
    unknown: Sequence[str]
    """Protocols of which nothing is known."""

    @classmethod
    def known(cls, root: str, plan: PipelinePlan) -> "KnownTransfer":
        of_seed = known_transfer_hours(root, plan)
        known = {protocol: hours * plan.nights.num_seeds for protocol, hours in of_seed.items()}
        return cls(sum(known.values()), known, [protocol for protocol in plan.protocols if protocol not in known])

    @property
    def parts(self) -> str:
        """` (fewshot 0.05 h, vit-paper 2.10 h)`, of several protocols."""
        if len(self.by_protocol) + len(self.unknown) == 1:
            return ""
        shown = [f"{protocol} {hours:.2f} h" for protocol, hours in self.by_protocol.items()]
        return f" ({', '.join([*shown, *(f'{protocol} not known yet' for protocol in self.unknown)])})"


def check_deadline(root: str, plan: PipelinePlan) -> str:
    """One line about the deadline of a plan, for the training and the transfer. Raises ValueError if the plan does not fit."""
    hours, nights, recipe = plan.request.deadline_hours, plan.nights, plan.training.recipe
    transfer = KnownTransfer(0.0, {}, ()) if hours is None else KnownTransfer.known(root, plan)
    if nights.cooldown_at_hours is not None:
        return _check_cooldown(hours, nights, known_images_per_s(root, plan.training), transfer)
    if hours is None:
        return "no deadline"
    cooldown, field = nights.cooldown_images or 0, "nights.advance_images" if nights.advance_images else "train_images"
    images = nights.advance_images or recipe.total_steps * recipe.input.global_batch_size * nights.num_seeds
    images += cooldown
    rate = known_images_per_s(root, plan.training)
    if rate is None:
        return f"deadline of {hours:g} h: no earlier run of this network has a known rate; the run is stopped at the deadline"
    needed = hours_of(images, rate)
    if needed + transfer.hours > hours:
        fits = max(int((hours - transfer.hours) * 3600 * rate / nights.num_seeds) - cooldown, 0)
        scored = f" and the transfer took {transfer.hours:.2f} h last time{transfer.parts}" if transfer.hours else ""
        raise ValueError(
            f"{images:,} images take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network{scored}, "
            f"but deadline_hours is {hours:g}. Set {field} to at most {fits:,}, or a larger deadline_hours."
        )
    scored = (
        f", the transfer {transfer.hours:.2f} h as last time{transfer.parts}"
        if transfer.hours
        else "; how long the transfer takes is not known yet"
    )
    return f"deadline of {hours:g} h: {images:,} images take {needed:.2f} h at {rate:,.0f} images/s{scored}"


def _check_cooldown(hours: float | None, nights: NightSettings, rate: float | None, transfer: KnownTransfer) -> str:
    """The line about the deadline of a training that is cooled down before it, so that the hours of the transfer are left. Raises
    ValueError if the cooldown does not fit."""
    begin, images = nights.cooldown_at_hours or 0, nights.cooldown_images or 0
    deadline = "no deadline" if hours is None else f"deadline of {hours:g} h"
    text = f"{deadline}: a training that is not done after {begin:g} h is cooled down over {images:,} images"
    if rate is None:
        return f"{text}; no earlier run of this network has a known rate"
    needed = hours_of(images, rate)
    if hours is not None and begin + needed + transfer.hours > hours:
        fits = max(int((hours - begin - transfer.hours) * 3600 * rate), 0)
        scored = f", which took {transfer.hours:.2f} h last time{transfer.parts}" if transfer.hours else ""
        raise ValueError(
            f"nights.cooldown_images={images:,} take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network, but from "
            f"nights.cooldown_at_hours={begin:g} to deadline_hours={hours:g} there are {hours - begin:g} h, also for the transfer{scored}. "
            f"Set fewer than {fits:,} images, or an earlier time."
        )
    return f"{text}, which take {needed:.2f} h at {rate:,.0f} images/s"
