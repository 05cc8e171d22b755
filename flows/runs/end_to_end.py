"""The whole pipeline: raw corpus -> shards -> pre-trained model -> fine-tuned scores -> comparison. Read this module first.

Each stage is a Ray job under a lease and has a run key, so that a second run reuses what is finished. The pipeline's record,
`pipelines/<key>.json`, is updated after every stage; MLflow's parent run is made from it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.find_corpus import Corpora, FoundCorpus
from vitline.data_prep.plan.check_refused import NothingNew
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.catalog.records import PipelineRecord, StageRecord, read_pipeline, write_pipeline
from vitline.flows.forms.evaluation_plan import EvaluationPlan, scored_models
from vitline.flows.forms.nights import NightSettings
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.forms.prepare_config import growth_request
from vitline.flows.forms.training_config import with_corpora
from vitline.flows.nights.from_records import night_of
from vitline.flows.nights.looks import Looks
from vitline.flows.nights.night_record import THE_GATE, NightRecord, write_night
from vitline.flows.nights.promote import make_champion
from vitline.flows.plans.held_out import score_text
from vitline.flows.runs.evaluate_tasks import ProtocolsFailed, evaluate_tasks, one_after_another
from vitline.flows.runs.long_run import next_step, train_cooldown, train_part
from vitline.flows.runs.pipeline_report import write_report
from vitline.flows.runs.prepare_corpus import PreparedCorpus, corpus_links, prepare_corpora
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import Skipped, StageFailed, StageResult, exclusively, run_store
from vitline.infra.config import replace
from vitline.infra.html.text import and_list
from vitline.infra.records import UnreadableRecord
from vitline.infra.redact import cleaned
from vitline.infra.runs.lease import LeaseHolder
from vitline.infra.runs.run_state import RunState
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, Score, TaskRef
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.evaluation.reference.corruption_errors import corruption_metrics
from vitline.vit.evaluation.reference.report import group_means, metrics_over_seeds
from vitline.vit.evaluation.tasks import VTAB_TASKS
from vitline.vit.published.model_record import published_record
from vitline.vit.run.resolved import ResolvedTraining
from vitline.vit.run.run_spec import RunSpec

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class PipelineResult:
    """The record of a finished pipeline, with the corpora and the scores of all seeds that its tables and report show."""

    record: PipelineRecord
    corpora: list[PreparedCorpus]
    scores: list[Score]
    night: NightRecord | None = None
    """The night with its verdict, if it was one."""


def pretrain_then_transfer(plan: PipelinePlan, services: Services) -> PipelineResult:
    """Prepares the corpora, pre-trains, and evaluates the model on the tasks, with a control from scratch if requested.

    Raises Skipped while the same pipeline is active elsewhere, StageFailed for a stage that does not finish.
    """
    services.origin = replace(services.origin, pipeline=plan.key)
    with exclusively(services, plan.key) as lease, PipelineRecorder(plan, services, lease) as recorder:
        rows = ("pretrain", *(evaluation_row(plan, protocol) for protocol in plan.protocols))
        names = ("prepare-corpus", *(row for _ in range(plan.nights.num_seeds) for row in rows))
        services.observer.outline(f"Stages of {plan.key}", names, {"MLflow": lambda: mlflow_link(services, plan.key)})
        recorder.note(part="preparation")
        corpora = part(services, "prepare-corpus", plan, lambda: prepare_stage(plan, services, recorder))
        transfer = Transfer(plan, corpora, services, recorder)
        for nth in range(plan.nights.num_seeds):
            train = partial(pretrain_stage, plan, nth, corpora[: len(plan.sources)], services, recorder)
            recorder.note(part=f"pre-training{of_seed(plan, nth)}")
            transfer.evaluate(part(services, "pretrain", plan, train, nth), nth)
            if transfer.is_decided:
                break
        recorder.end("finished")
    return PipelineResult(recorder.record, corpora, transfer.every_score, recorder.night)


def mlflow_link(services: Services, key: str) -> str | None:
    url = services.sender.pipeline_url(key)
    return url and f"[the pipeline]({url})"


def part(
    services: Services, name: str, plan: PipelinePlan, body: Any, nth_seed: int = 0, protocol: str | None = None
) -> Any:
    title = f"{plan.key}, seed {plan.request.seed + nth_seed}" if nth_seed else plan.key
    if protocol is None or len(plan.protocols) == 1:
        return services.observer.part(name, title, {"pipeline": plan.key}, body)
    request = {"pipeline": plan.key, "protocol": protocol}
    return services.observer.part(name, f"{title}, {protocol}", request, body, row=evaluation_row(plan, protocol))


def evaluation_row(plan: PipelinePlan, protocol: str) -> str:
    """The name of an evaluation on the page of the pipeline."""
    return f"evaluate {protocol}" if len(plan.protocols) > 1 else "evaluate"


def of_seed(plan: PipelinePlan, nth_seed: int) -> str:
    """` of seed 5`, where there are several seeds."""
    return f" of seed {plan.request.seed + nth_seed}" if plan.nights.num_seeds > 1 else ""


def prepare_stage(plan: PipelinePlan, services: Services, recorder: "PipelineRecorder") -> list[PreparedCorpus]:
    """The corpora to train on, then those of the tasks. Presets are prepared if they are missing; with `nights.ingest`, the first corpus
    gets the new images of its source."""
    started = time.monotonic()
    ingested = ingest_new_images(plan, services) if plan.nights.ingest else None
    choices = (ingested.corpus if ingested else plan.sources[0], *plan.sources[1:], *plan.tasks)
    before = {uri: existing_corpus(uri) for uri in choices if isinstance(uri, str)}
    for corpus in before.values():
        show_report(services, corpus)
    # Each preset once: one may be trained on and be a task.
    requests = list(dict.fromkeys(choice for choice in choices if isinstance(choice, CorpusConfig)))
    prepared, key, result = prepare_corpora(requests, services)
    made = {request.name: corpus for request, corpus in zip(requests, prepared, strict=True)}
    corpora = [made[c.name] if isinstance(c, CorpusConfig) else before[c] for c in choices]
    for request in requests:
        show_report(services, made[request.name])
    counts = ", ".join(f"{c.manifest.name} {c.manifest.counts.num_accepted:,}" for c in corpora)
    refused = sum(c.manifest.counts.num_refused for c in corpora)
    reused, added = result is None, f"{ingested.num_images:,} new images, " if ingested else ""
    if ingested and ingested.run_key:
        key, reused = key or ingested.run_key, False
    what, where = f"{counts} images, {added}{refused:,} refused", f"{open_store(services.root).uri}/corpora"
    recorder.stage("prepare", key, reused, time.monotonic() - started, what, where)
    recorder.note(
        corpora={c.manifest.name: c.manifest.digest for c in corpora},
        images={c.manifest.name: c.manifest.counts.num_accepted for c in corpora},
    )
    return corpora


def show_report(services: Services, corpus: PreparedCorpus) -> None:
    """Shows where the report of a corpus is: in the store, and in MLflow."""

    # Of a corpus that was there already MLflow has the run or has not: it is not asked at each refresh of the page.
    known = corpus_links(corpus, services) if corpus.reused else None

    def where() -> str:
        links = known or corpus_links(corpus, services)
        return ", ".join(links[name] for name in ("report", "report page") if name in links)

    services.observer.report(f"report of {corpus.manifest.name}", where)


class Ingested(NamedTuple):
    """A corpus with the images that its source has got since it was prepared."""

    corpus: str
    """URI of the corpus to train on."""
    num_images: int
    """How many are new."""
    run_key: str | None
    """The run that added them now; None if nothing was prepared."""


def ingest_new_images(plan: PipelinePlan, services: Services) -> Ingested:
    """The corpus to train on, after what its source has got since was added as a segment. The corpus itself stays as it is."""
    corpus = str(plan.sources[0])
    request = growth_request(services.root, corpus)
    if request is None:
        return Ingested(corpus, 0, None)
    try:
        (grown,), key, _ = prepare_corpora([request], services)
    except NothingNew as nothing:
        services.observer.say(str(nothing))
        return Ingested(corpus, 0, None)
    before = load_manifest(open_store(corpus)).counts.num_accepted
    return Ingested(grown.uri, grown.manifest.counts.num_accepted - before, key)


def existing_corpus(uri: str) -> PreparedCorpus:
    store = open_store(uri)
    return PreparedCorpus(store.uri, load_manifest(store), True)


def pretrain_stage(
    plan: PipelinePlan,
    nth_seed: int,
    corpora: Sequence[PreparedCorpus],
    services: Services,
    recorder: "PipelineRecorder",
) -> str:
    """URI of the published model of the n-th seed. The record names that of the first."""
    draft = replace(plan.training, **{"recipe.seed": plan.training.recipe.seed + nth_seed})
    found = [FoundCorpus(open_store(corpus.uri), corpus.manifest) for corpus in corpora]
    known = Corpora(open_store(services.root), found)
    training = with_corpora(services.root, known, draft, plan.request, found)
    if plan.nights.advance_images is not None:
        spec, trained = advance_long_run(plan.nights, training, services, recorder)
    elif plan.nights.cooldown_at_hours is not None:
        spec, trained = train_until_cooldown(plan, training, services, recorder)
    else:
        spec, trained = train_model(training, services, plan.night)
    state = trained.state
    what = f"{state['images_seen']:,} images in {state['step']:,} steps"
    if score := score_text(state, labelled=draft.recipe.masked_patches is None):
        what += f", {score}"
    if "val_top1" in state:
        before = recorder.record.metrics.get("val/top1", 0.0)
        recorder.note(metrics={"val/top1": before + (state["val_top1"] - before) / (nth_seed + 1)})  # mean over seeds
    recorder.run_stage("pretrain", spec.run_key, trained, what)
    model: str = state["model"]
    if not nth_seed:
        digest = published_record(open_store(model))["digest"]
        recorder.note(model=model, model_digest=digest, images_seen=state["images_seen"])
    return model


def advance_long_run(
    nights: NightSettings, training: ResolvedTraining, services: Services, recorder: "PipelineRecorder"
) -> tuple[RunSpec, StageResult]:
    """Trains the long run a part further. Returns the run whose model is scored: a cooldown from there, or the long run at its end."""
    advance, cooldown = nights.advance_images or 0, nights.cooldown_images or 0
    run, recipe = run_store(services.root, training.spec().run_key), training.config.recipe
    # A pipeline that was cut goes to the step that it had begun for, however far it came.
    step = recorder.record.long_run_step or next_step(recipe, advance, run)
    recorder.note(long_run_step=step)
    long_run, trained = train_part(training, services, step)
    if step == recipe.total_steps:
        if trained.reused:
            services.observer.say(f"{long_run.run_key} is at its end, so there was nothing left to train")
        return long_run, trained
    batch = recipe.input.global_batch_size
    what = f"{step * batch:,} of {recipe.total_steps * batch:,} images of the long run"
    recorder.run_stage("advance", long_run.run_key, trained, what)
    return train_cooldown(training, services, long_run, step, cooldown)


def train_until_cooldown(
    plan: PipelinePlan, training: ResolvedTraining, services: Services, recorder: "PipelineRecorder"
) -> tuple[RunSpec, StageResult]:
    """Trains to the end, or until the cooldown must begin. Returns the run whose model is scored: the cooldown from there,
    or the training itself. Raises StageFailed where that time came within the warmup."""
    nights, recipe, step = plan.nights, training.config.recipe, recorder.record.long_run_step
    if step is not None:  # a pipeline that was cut has begun the cooldown
        spec = training.spec(plan.night)
    else:
        begin = recorder.record.started_at + 3600 * (nights.cooldown_at_hours or 0)
        spec, trained = train_model(training, services, plan.night, pause_at=begin)
        if trained.state["state"] == "finished":
            return spec, trained
        step = trained.state["step"]
        if step <= (warmup := recipe.optim.steps_to_peak):
            raise StageFailed(
                f"{spec.run_key} was at step {step:,} when the time for its cooldown came "
                f"(nights.cooldown_at_hours={nights.cooldown_at_hours:g}), within its warmup of {warmup:,} steps. Set a later time, or "
                "start earlier.",
                "out_of_time",
            )
        recorder.note(long_run_step=step)
        batch = recipe.input.global_batch_size
        what = f"{step * batch:,} of {recipe.total_steps * batch:,} images, then out of time"
        recorder.run_stage("advance", spec.run_key, trained, what)
        services.observer.say(f"{spec.run_key} is out of time at step {step:,}; a cooldown from there follows")
    return train_cooldown(training, services, spec, step, nights.cooldown_images or 0)


class Transfer:
    """The evaluations of a pipeline's models by its protocols. The record, and the report, have each as soon as it has ended."""

    def __init__(
        self, plan: PipelinePlan, corpora: Sequence[PreparedCorpus], services: Services, recorder: "PipelineRecorder"
    ) -> None:
        self._plan, self._services, self._recorder = plan, services, recorder
        self._trained_on, self._tasks = corpora[: len(plan.sources)], corpora[len(plan.sources) :]
        self._scores: dict[str, list[Score]] = {protocol: [] for protocol in plan.protocols}
        self._of_first_seed: list[EvaluationSpec] = []
        names = [corpus.manifest.name for corpus in self._tasks]
        protocol, root = plan.protocols[plan.verdict_protocol], open_store(services.root)
        self._looks = self._tried(lambda: Looks.planned(root, recorder.record, protocol, names), None)
        self.is_decided = False
        """Whether the verdict of the night is certain without the rest of its evaluation."""
        if self._looks:
            services.observer.say(self._looks.text)

    @property
    def every_score(self) -> list[Score]:
        """Those of all seeds, protocol by protocol."""
        return [score for scores in self._scores.values() for score in scores]

    def evaluate(self, model: str, nth_seed: int) -> None:
        """Evaluates the model of the n-th seed by each protocol."""

        def note(*protocols: str) -> None:
            self._recorder.note(part=f"evaluation with {and_list(protocols)}{of_seed(self._plan, nth_seed)}")

        def by(protocol: str) -> None:
            note(protocol)
            body = partial(self._stage, model, nth_seed, protocol)
            part(self._services, "evaluate", self._plan, body, nth_seed, protocol)

        try:
            one_after_another([*self._plan.protocols], by)
        except ProtocolsFailed as error:
            note(*error.protocols)
            raise

    def _stage(self, model: str, nth_seed: int, protocol: str) -> None:
        plan, recorder = self._plan, self._recorder
        evaluation = EvaluationPlan(
            models=scored_models(model, plan.protocols[protocol], plan.request.from_scratch),
            tasks=tuple(TaskRef(name=corpus.manifest.name, corpus=corpus.uri) for corpus in self._tasks),
            architecture=plan.training.recipe.model,
            protocol=plan.protocols[protocol],
            seed=plan.request.seed + nth_seed,
        )
        if self._looks and protocol == plan.verdict_protocol:
            spec, row, new = self._until_certain(self._looks, evaluation, nth_seed, protocol)
        else:
            spec, row, new = self._evaluated(evaluation, protocol)
        self._scores[protocol] += new
        recorder.add(row)
        recorder.note(metrics=pipeline_metrics(plan, protocol, self._scores[protocol]))
        if not nth_seed:
            self._of_first_seed.append(spec)
        report = write_report(
            self._services.root, recorder.record, self._trained_on, self._tasks, self.every_score, self._of_first_seed
        )
        recorder.note(report=report)

    def _evaluated(self, evaluation: EvaluationPlan, protocol: str) -> tuple[EvaluationSpec, StageRecord, list[Score]]:
        """The job of an evaluation, its row in the record, and its scores."""
        spec, scored, new = evaluate_tasks(f"{self._plan.request.name}-transfer", evaluation, self._services)
        trainings = sum(len(score.trials) for score in new)
        how = f"{trainings} trainings" if trainings else "frozen features"
        asked = "1 task" if len(evaluation.tasks) == 1 else f"{len(evaluation.tasks)} tasks"
        inits = "2 inits" if len(evaluation.models) > 1 else "1 init"
        what = f"{protocol}: {asked} x {inits}, {how}"
        return spec, self._recorder.stage_record("evaluate", spec.run_key, scored, what, protocol), new

    def _until_certain(
        self, looks: Looks, evaluation: EvaluationPlan, nth_seed: int, protocol: str
    ) -> tuple[EvaluationSpec, StageRecord, list[Score]]:
        """Evaluates one group of tasks after the other, each time with those before, which have their scores already. Seeds after the
        first are evaluated as a whole."""
        root, rows = open_store(self._services.root), list[StageRecord]()
        for num_groups in range(1 if nth_seed == 0 else len(looks.groups), len(looks.groups) + 1):
            names = {name for group in looks.groups[:num_groups] for name in group}
            some = tuple(task for task in evaluation.tasks if task.name in names)
            spec, row, new = self._evaluated(replace(evaluation, tasks=some), protocol)
            rows.append(row)
            first, look = rows[0], looks.at(nth_seed, num_groups)
            row = replace(
                row,
                reused=all(each.reused for each in rows),
                resumed=first.resumed,
                wall_s=sum(each.wall_s for each in rows),
            )
            self._recorder.note(look=look)
            if look.is_last:
                break
            record = replace(self._recorder.record, stages=(*self._recorder.record.stages, row))
            if self._tried(partial(looks.is_certain, root, record), False):
                self.is_decided = True
                self._services.observer.say(f"the verdict is certain after {look.scored}; the rest is left out")
                break
            self._services.observer.say(f"the verdict is not certain after {look.scored}")
        return spec, row, new

    def _tried(self, make: Callable[[], T], otherwise: T) -> T:
        """Whatever is wrong with the looks of a night, it is evaluated as it would be without them."""
        try:
            return make()
        except Exception as error:
            log.exception("no looks of %s", self._plan.key)
            self._services.observer.say(
                f"whether the verdict is certain could not be found out, so the evaluation goes on: {cleaned(str(error))}"
            )
            return otherwise


def pipeline_metrics(plan: PipelinePlan, protocol: str, scores: Sequence[Score]) -> dict[str, float]:
    """The headline metrics of one protocol. Two protocols that fine-tune would have the same names, so the one that is compared with
    other pipelines has them, and those of others begin with the name of their protocol."""
    beside = protocol != plan.verdict_protocol and isinstance(plan.protocols[protocol], Protocol)
    return {f"{protocol}/{name}" if beside else name: value for name, value in headline(scores).items()}


def headline(scores: Sequence[Score]) -> dict[str, float]:
    """The scores of model and control by metric name (docs/generate/metrics.py), with the means over tasks of VTAB and of ImageNet-C."""
    metrics = metrics_over_seeds(score for score in scores if score.model_digest is not None)
    control = metrics_over_seeds(score for score in scores if score.model_digest is None)
    metrics |= {f"{name}_from_scratch": value for name, value in control.items()}
    of_vtab = {task.name: metrics[name] for task in VTAB_TASKS if (name := f"vtab/{task.name}/top1") in metrics}
    return metrics | group_means(of_vtab) | corruption_metrics(metrics)


class PipelineRecorder:
    """Writes the pipeline's record to the store: at the start, after every stage, and at the end."""

    def __init__(self, plan: PipelinePlan, services: Services, lease: LeaseHolder):
        self._root, self._services, self._lease = open_store(services.root), services, lease
        self.night: NightRecord | None = None
        self._promotes = plan.nights.promote
        now, before = time.time(), self._before(plan)
        self.record = PipelineRecord(
            key=plan.key,
            name=plan.request.name,
            request=plan.request.model_dump(mode="json"),
            night=plan.night,
            origin=services.origin,
            started_at=now,
            updated_at=now,
            long_run_step=before.long_run_step if before else None,
            protocols=tuple(plan.protocols),
            verdict_protocol=plan.verdict_protocol,
        )

    def _before(self, plan: PipelinePlan) -> PipelineRecord | None:
        """The record of the same pipeline, if it was cut, or a night; a finished one that a person starts again continues."""
        with contextlib.suppress(FileNotFoundError, UnreadableRecord):
            record = read_pipeline(self._root, plan.key)
            return record if plan.night or record.state != "finished" else None
        return None

    def __enter__(self) -> "PipelineRecorder":
        self.note()
        self._services.sender.follow_pipeline(self.record.key)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with contextlib.suppress(OSError, RuntimeError):
                stop = self._services.observer.stop(error)
                state = stop.reason if stop else ended_as(error)
                self.end(state, str(stop or error) or type(error).__name__)

    def note(self, metrics: dict[str, float] | None = None, **changes: Any) -> None:
        """Writes the record with these changes; `metrics` are added to the recorded ones."""
        merged = {"metrics": self.record.metrics | metrics} if metrics else {}
        self.record = replace(self.record, updated_at=time.time(), **merged, **changes)
        self._lease.check()
        write_pipeline(self._root, self.record)

    def stage_record(
        self, stage: str, key: str, result: StageResult, what: str, protocol: str | None = None
    ) -> StageRecord:
        return StageRecord(
            stage=stage,
            run_key=key,
            reused=result.reused,
            resumed=result.resumed,
            wall_s=result.wall_s,
            what=what,
            where=self._root.uri_of(f"runs/{key}"),
            protocol=protocol,
        )

    def run_stage(self, stage: str, key: str, result: StageResult, what: str) -> None:
        self.add(self.stage_record(stage, key, result, what))

    def stage(self, stage: str, key: str | None, reused: bool, wall_s: float, what: str, where: str) -> None:
        self.add(StageRecord(stage=stage, run_key=key, reused=reused, wall_s=wall_s, what=what, where=where))

    def add(self, row: StageRecord) -> None:
        self.note(stages=tuple(r.model_dump() for r in (*self.record.stages, row)))

    def end(self, state: RunState, reason: str = "") -> None:
        reason = cleaned(reason)[:2000]
        if self.record.night is not None:  # before the end, so that whoever sees the end finds the verdict
            self._judge(state, reason)
        self.note(state=state, reason=reason)

    def _judge(self, state: RunState, reason: str) -> None:
        """Writes the night with its verdict. Whatever is wrong with a verdict, the night ends as it would without one."""
        try:
            self.night = night_of(self._root, self.record, state, reason)
            self._lease.check()
            write_night(self._root, self.night)
            self._services.observer.say(self.night.sentence)
            if (gate := self.night.gate) is not None:
                self._services.observer.say(gate.reason)
                if gate.passed and self._promotes:
                    self._lease.check()
                    make_champion(self._root, self.record, why=gate.reason, by=THE_GATE)
        except Exception as error:
            log.exception("no verdict of %s", self.record.key)
            self._services.observer.say(f"the verdict of this night could not be made: {cleaned(str(error))}")


def ended_as(error: BaseException) -> RunState:
    """The end state of a pipeline after this error."""
    if isinstance(error, StageFailed):
        return error.state
    return "preempted" if isinstance(error, Skipped) or not isinstance(error, Exception) else "failed"
