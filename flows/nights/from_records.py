"""The verdict of a night from what the store holds: records of pipelines, scores, predictions and starts of trainings.

The same records give the same verdict: `judge_again` uses the nights that the stored verdict names.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.catalog.records import PipelineRecord, read_pipeline
from vitline.flows.forms.nights import night_settings
from vitline.flows.forms.requested_protocol import as_for_one
from vitline.flows.nights.gate import gate
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE, Verdict, incomplete, judge
from vitline.flows.nights.night_record import (
    NIGHTS,
    ChampionRecord,
    GateResult,
    NightRecord,
    OtherScore,
    night_key,
    read_champion,
)
from vitline.flows.nights.night_scores import NightScores, TaskScore
from vitline.infra.config import flatten, replace
from vitline.infra.records import UnreadableRecord, readable, reading
from vitline.infra.runs.run_state import RunState
from vitline.infra.storage import Store
from vitline.vit.evaluation.evaluate import Score, final_result
from vitline.vit.run.run_spec import read_starts
from vitline.vit.training.predictions import Predictions

NOISE_NIGHTS = 30
"""The noise of seeds is estimated from at most so many earlier nights that have all scores, and so many that were decided early."""
# Fields of a request that say when or how fast it runs, which no score depends on.
_NO_RESULT = ("deadline_hours", "max_late_hours", "num_workers", "name")
_READERS = 8


def night_of(root: Store, record: PipelineRecord, state: RunState, reason: str = "") -> NightRecord:
    """The record of a night whose pipeline ends in this state, with its verdict. Raises if the verdict cannot be made."""
    assert record.night is not None
    verdict, gate_result = incomplete(state, reason, record.part), None
    if state == "finished":
        champion = read_champion(root, record.name)
        verdict = verdict_of(root, record, OtherNights.before(root, record, champion))
        gate_result = tried_gate(root, record, verdict, champion)
    return replace(
        without_verdict(replace(record, state=state, reason=reason)),
        at=time.time(),
        verdict=verdict,
        gate=gate_result,
        others=other_scores(root, record, verdict),
    )


def other_scores(root: Store, record: PipelineRecord, verdict: Verdict) -> list[OtherScore]:
    """The scores by protocols that the verdict does not take, with those of the nights that it takes."""
    theirs: dict[str, Mapping[str, float]] = {}
    for one in verdict.against:
        with contextlib.suppress(FileNotFoundError, UnreadableRecord):
            theirs[one.who] = read_pipeline(root, one.key).metrics
    return [
        OtherScore(
            name=name, value=value, before={who: metrics[name] for who, metrics in theirs.items() if name in metrics}
        )
        for name, value in record.other_metrics.items()
    ]


def tried_gate(root: Store, record: PipelineRecord, verdict: Verdict, champion: ChampionRecord | None) -> GateResult:
    """The gate's result; where records are gone that it reads, a refusal that says so."""
    try:
        return gate(root, record, verdict, champion)
    except (FileNotFoundError, UnreadableRecord) as error:
        return GateResult(passed=False, reason=f"The champion stays: the gate needs records that are gone ({error}).")


def judge_again(root: Store, night: NightRecord) -> Verdict:
    """The verdict of a night, made again from the records that its stored verdict names."""
    assert night.pipeline is not None
    record, stored = read_pipeline(root, night.pipeline), night.verdict
    if stored is None:
        again = night_of(root, record, record.state, record.reason).verdict
        assert again is not None
        return again
    if record.state != "finished":
        return incomplete(record.state, record.reason, record.part)
    keys: dict[str, str] = {one.who: one.key for one in stored.against}
    others = OtherNights.read(root, record, keys.get("champion"), keys.get("last night"), stored.noise_nights)
    return verdict_of(root, record, others)


@dataclass(frozen=True)
class OtherNights:
    """The nights that a verdict needs, as far as their records are there."""

    champion: NightScores | None
    last_night: NightScores | None
    earlier: Sequence[NightScores]
    """Oldest first, for the noise of seeds; without predictions."""

    @classmethod
    def before(cls, root: Store, record: PipelineRecord, champion: ChampionRecord | None) -> "OtherNights":
        """Those of a night that is judged for the first time."""
        assert record.night is not None
        earlier = earlier_nights(root, record.name, record.night)
        newest = {
            each.key
            for decided_early in (False, True)
            for each in [each for each in earlier if each.decided_early == decided_early][-NOISE_NIGHTS:]
        }
        noise_nights = [each.key for each in earlier if each.key in newest]
        last_night = noise_nights[-1] if noise_nights else None
        return cls.read(root, record, champion.pipeline if champion else None, last_night, noise_nights)

    @classmethod
    def read(
        cls, root: Store, record: PipelineRecord, champion: str | None, last_night: str | None, noise_nights: Iterable[str]
    ) -> "OtherNights":  # fmt: skip
        """Those of these keys of pipelines, by the verdict's protocol of a record."""

        def read(key: str | None, predictions: bool) -> NightScores | None:
            with contextlib.suppress(FileNotFoundError, UnreadableRecord):
                return scores_of(root, read_pipeline(root, key), predictions, record.verdict_protocol) if key else None
            return None

        with ThreadPoolExecutor(_READERS) as pool:
            earlier = [one for one in pool.map(lambda key: read(key, False), noise_nights) if one]
        return cls(read(champion, True), read(last_night, True), earlier)


def verdict_of(root: Store, record: PipelineRecord, others: OtherNights) -> Verdict:
    """The verdict of a whole night, or of one at a look at its scores."""
    ours, look = scores_of(root, record, predictions=True), record.look
    if ours is None:
        return incomplete("failed", "It has no scores.")
    wanted = night_settings(record.request.get("overrides", {})).smallest_effect
    level = look.level if look else FALSE_POSITIVE_RATE
    verdict = judge(ours, others.champion, others.last_night, others.earlier, wanted=wanted, level=level)
    if look is None or not record.decided_early:
        return verdict
    return replace(verdict, sentence=f"{verdict.sentence} Decided after {look.scored}.", decided_after=look.scored)


def earlier_nights(root: Store, name: str, night: datetime) -> list[PipelineRecord]:
    """The whole nights of the same series before this one, oldest first. Missed, late and cut ones are not among them."""
    nights = [
        (each.night, each.started_at, each)
        for each in list_pipelines(root.uri)
        if each.night and each.name == name and each.state == "finished" and each.night < night
    ]
    return [each for *_, each in sorted(nights, key=lambda night: night[:2])]


def earlier_scores(root: Store, name: str, night: datetime) -> list[NightScores]:
    """The scores of the newest of these nights, as far as there are any, for the noise of seeds."""
    newest = earlier_nights(root, name, night)[-NOISE_NIGHTS:]
    return [scores for each in newest if (scores := scores_of(root, each, predictions=False))]


def scores_of(
    root: Store, record: PipelineRecord, predictions: bool, protocol: str | None = None
) -> NightScores | None:
    """The scores of a pipeline's models, with or without their predictions; None if it has none. They are by this protocol if it has
    such scores, else by that of its own verdict."""
    if protocol is not None and any(stage.protocol == protocol for stage in record.stages):
        record = replace(record, verdict_protocol=protocol)
    by_model: dict[str, dict[str, Score]] = {}
    for stage in record.stages_by_name.get("evaluate", []):
        if stage.run_key:
            for score in scores_of_models(root, stage.run_key):
                by_model.setdefault(str(score.model_digest), {})[score.metric_name] = score
    if not by_model:
        return None
    everywhere = set.intersection(*({*scores} for scores in by_model.values()))
    names = [name for name in next(iter(by_model.values())) if name in everywhere]
    tasks = {name: tuple(task_score(root, scores[name], predictions) for scores in by_model.values()) for name in names}
    return NightScores(record.key, record.night, tuple(by_model), tasks, facts_of(root, record))


def scores_of_models(root: Store, run_key: str) -> list[Score]:
    """The scores of an evaluation, without those from scratch. Raises UnreadableRecord."""
    state = root.child(f"runs/{run_key}").read_json_or_none("state.json") or {}
    with reading(root.uri_of(f"runs/{run_key}/state.json")):
        scores = [Score.model_validate(score) for score in state.get("scores") or ()]
    return [score for score in scores if score.model_digest is not None]


def task_score(root: Store, score: Score, predictions: bool) -> TaskScore:
    found = read_predictions(root, score) if predictions else None
    right = None if found is None else found.right
    return TaskScore(
        score.value, score.num_examples, score.majority_fraction, score.split_digest, right, wall_s=score.wall_s
    )


def read_predictions(root: Store, score: Score) -> Predictions | None:
    """The predictions of the final trial; None for a probe, or if they were deleted."""
    trial = final_result(root, score)
    with contextlib.suppress(FileNotFoundError):
        return Predictions.from_parquet(root.read(f"trials/{trial.files[0]}")) if trial and trial.files else None
    return None


def facts_of(root: Store, record: PipelineRecord) -> dict[str, Any]:
    """What the scores may depend on: request, corpora and their images, code, versions and hardware, by dotted name."""
    request: dict[str, Any] = {name: value for name, value in record.request.items() if name not in _NO_RESULT}
    if (asked := request.get("protocol")) is not None:  # other protocols change none of these scores
        request = as_for_one(request, record.verdict_protocol or asked)
    overrides: Mapping[str, Any] = request.pop("overrides", {})
    facts: dict[str, Any] = {
        **{f"request.{name}": value for name, value in flatten(request).items()},
        **{
            f"request.{name}": value
            for name, value in overrides.items()
            if not name.startswith(("execution.", "nights."))
        },
        **{f"corpora.{name}": digest[:12] for name, digest in record.corpora.items()},
        **{f"images.{name}": number for name, number in record.images.items()},
        "images_seen": record.images_seen,
    }
    for stage in record.stages:
        if stage.stage == "pretrain" and stage.run_key:
            starts = sorted(read_starts(root.child(f"runs/{stage.run_key}")), key=lambda start: start["at"])
            for start in starts[-1:]:
                versions = dict(start["versions"])
                facts |= {"commit": versions.pop("commit", None), "hardware": start["hardware"]}
                facts |= {f"versions.{name}": version for name, version in versions.items()}
    return {name: value for name, value in facts.items() if value is not None}


def known_nights(root: Store, report: Callable[[UnreadableRecord], None], most: int | None = None) -> list[NightRecord]:
    """Every attempt at a night, newest first: those that have ended, were not run, or are running. With `most` no more than so many
    records of a series are read, the newest. A record that cannot be read is reported."""
    keys = dict[str, list[str]]()
    for key in sorted(root.list(f"{NIGHTS}/")):  # the oldest of a series first
        keys.setdefault(key.split("/")[1], []).append(key)
    pipelines = [
        pipeline
        for pipeline in list_pipelines(root.uri)
        if pipeline.night is not None
        and (pipeline.state == "running" or night_key(pipeline.name, pipeline.night) not in keys.get(pipeline.name, ()))
    ]

    chosen = [key for of_series in keys.values() for key in of_series[-(most or 0) :]]
    again = {pipeline.key for pipeline in pipelines}  # an earlier attempt at such a night may have left a record
    found = [
        night for night in readable(chosen, partial(NightRecord.load, root), report) if night.pipeline not in again
    ]
    found += [without_verdict(pipeline) for pipeline in pipelines]
    return sorted(found, key=lambda night: (night.night, night.name, night.pipeline is not None), reverse=True)


def without_verdict(record: PipelineRecord) -> NightRecord:
    """The night of a pipeline that has no verdict, because it is running or none could be made."""
    assert record.night is not None
    return NightRecord(
        name=record.name,
        night=record.night,
        outcome=record.state,
        reason=record.reason,
        part="" if record.state == "finished" else record.part,
        pipeline=record.key,
        origin=record.origin,
        at=record.started_at if record.state == "running" else record.updated_at,
    )
