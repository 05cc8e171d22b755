"""The flows as Prefect runs them. Each takes one form, which is checked and resolved first (`request_checks.py`), and calls plain
functions that do not use Prefect. A flow holds no data and trains nothing: it starts jobs and follows them.

The code that does the work is imported after the form has been checked, so that an invalid form is refused fast.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect import flow, runtime
from prefect.client.schemas.objects import FlowRun as PrefectFlowRun
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort, Pause

from vitline.data_prep.config import CorpusConfig
from vitline.flows.forms.evaluation_plan import EvaluationPlan
from vitline.flows.forms.forms import FORMS, CollectGarbageRequest, PipelineRequest, ReconcileRequest
from vitline.flows.forms.nights import night_by_hand
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.self_training_plan import SelfTrainingPlan
from vitline.flows.on_prefect.flow_run import FlowRun, check_project, check_user_functions, read_request
from vitline.flows.on_prefect.flow_states import state_of
from vitline.flows.on_prefect.prefect_observer import PrefectObserver, suspended_state
from vitline.flows.on_prefect.prefect_private import filter_engine_log, outlive_the_worker
from vitline.flows.on_prefect.request_checks import RESOLVES, Resolve, as_requested
from vitline.flows.on_prefect.run_names import descriptive_name, given_name
from vitline.flows.plans.held_out import score_text
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import Services, Suspended, open_services
from vitline.flows.runs.stage import Skipped, exclusively, still_running, stop_jobs_of
from vitline.infra.config import FrozenConfig
from vitline.infra.html.text import field, percent
from vitline.infra.night import night_text
from vitline.infra.runs.liveness import sending_heartbeats
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.features.prediction_plan import PredictionSpec
from vitline.vit.run.resolved import ResolvedTraining

if TYPE_CHECKING:
    from vitline.flows.nights.night_record import NightRecord
    from vitline.flows.on_prefect.alerts.problems import Problem
    from vitline.flows.ops.reconcile import Finding
    from vitline.flows.runs.end_to_end import PipelineResult

log = logging.getLogger(__name__)
filter_engine_log()
outlive_the_worker()


def run_name() -> str:
    """The name that a person chose, else a descriptive one such as `icons-birds-s0-1121-030000`. A resumed run keeps its name."""
    name: str | None = runtime.flow_run.name
    if name and (given_name(name) or runtime.flow_run.run_count):
        return name
    request = runtime.flow_run.parameters.get("request") or {}
    return descriptive_name(str(runtime.flow_run.flow_name), request, datetime.now(UTC))


def stop_jobs(flow: Any, flow_run: PrefectFlowRun, state: State) -> None:
    """Stops jobs that a cancelled flow process could not stop. Prefect calls it with these argument names."""
    with open_services(Settings()) as services:
        stop_jobs_of(services, str(flow_run.id))


Body = Callable[[Any, Services, FlowRun], str | State]
"""The work of a flow on what its form resolves to. Returns the final state, which may have a name of its own, or the message of
COMPLETED."""


def vitline_flow(name: str, resolve: Resolve | None = None) -> Callable[[Body], Any]:
    """Decorator that makes a flow with the form of this name. The flow itself checks the form, to report errors as sentences. Prefect
    retries nothing: the store records what is finished, and Ray restarts workers."""

    def decorate(body: Body) -> Any:
        def run_flow(request: Any) -> State:
            return run(name, resolve or RESOLVES[name], request, body)

        run_flow.__name__, run_flow.__doc__ = body.__name__, body.__doc__
        return flow(
            name=name,
            flow_run_name=run_name,
            validate_parameters=False,
            persist_result=False,
            retries=0,
            on_cancellation=[stop_jobs],
        )(run_flow)

    return decorate


def run(name: str, resolve: Resolve, given: Mapping[str, Any] | FrozenConfig, body: Body) -> State:
    """Validates and resolves the form, runs `body`, and returns the final state."""
    this = FlowRun.current()
    fields = given.model_dump(exclude_unset=True) if isinstance(given, FrozenConfig) else given
    with PrefectObserver(this.id) as observer, contextlib.ExitStack() as heartbeat:
        try:
            check_project(this)
            request = read_request(FORMS[name], fields, this.defaults)
            check_user_functions(request)
            heartbeat.enter_context(sending_heartbeats(open_store(Settings().root), str(this.id)))
            with open_services(Settings(), observer, this.origin) as services:
                done = body(resolve(services.root, request), services, this)
                state = done if isinstance(done, State) else State(type=StateType.COMPLETED, message=done)
        except Suspended as suspended:  # keeps the state that the user set when suspending the run
            raise Pause(state=suspended_state()) from suspended
        except BaseException as error:
            ended = state_of(error)
            if ended is None:
                raise
            state = ended
        observer.wait_for_server()
    if observer.deleted:  # there is no run to report a state of, and Prefect does not log the text of Abort
        log.warning(
            "flow run %s, which was deleted in Prefect, has ended as %s: %s", this.id, state.name, state.message
        )
        raise Abort
    return state


@vitline_flow("prepare-corpus")
def prepare_corpus(config: CorpusConfig, services: Services, this: FlowRun) -> str:
    """Prepares a corpus of verified Parquet shards from labelled images. A finished corpus is reused."""
    from vitline.flows.runs.prepare_corpus import corpus_links, corpus_rows, prepare_corpora

    (corpus,), _, _ = prepare_corpora([config], services)
    services.observer.table("corpus", corpus.manifest.name, ["field", "value"], corpus_rows(corpus))
    services.observer.links("report", f"Content of {corpus.manifest.name}", corpus_links(corpus, services))
    reused = " (finished before)" if corpus.reused else ""
    return f"{corpus.manifest.counts.num_accepted:,} images in {corpus.uri}{reused}"


def train(training: ResolvedTraining, services: Services, this: FlowRun) -> str:
    """Trains a network with one Ray Train job. Returns URI and score of the model."""
    spec, result = train_model(training, services)
    state = result.state
    fields: Mapping[str, object] = state
    names = ("step", "images_seen", "val_top1", "val_mean_average_precision", "model")
    rows = [[name, field(name, fields[name])] for name in names if name in fields]
    services.observer.table("model", spec.run_key, ["field", "value"], rows)
    score = score_text(state, labelled=training.config.recipe.masked_patches is None)
    return f"{state['model']}{f', {score}' if score else ''}{' (trained before)' if result.reused else ''}"


pretrain_flow = vitline_flow("pretrain")(train)
branch = vitline_flow("branch")(train)
finetune = vitline_flow("finetune")(train)


@vitline_flow("self-train")
def self_train_flow(plan: SelfTrainingPlan, services: Services, this: FlowRun) -> str:
    """Labels images with a teacher, and pre-trains a student on them and on labelled ones."""
    from vitline.flows.runs.self_train import self_train

    return self_train(plan, services, lambda student: train(student, services, this))


@vitline_flow("evaluate")
def evaluate(plans: Sequence[EvaluationPlan], services: Services, this: FlowRun) -> str:
    """Evaluates a published model on tasks, by one protocol after the other."""
    from vitline.flows.reports.score_tables import score_tables_markdown
    from vitline.flows.runs.end_to_end import headline
    from vitline.flows.runs.evaluate_tasks import SCORE_COLUMNS, evaluate_in_turn, score_cells
    from vitline.flows.runs.stage import StageResult
    from vitline.vit.evaluation.evaluate import Score

    if plans[0].note:
        services.observer.say(plans[0].note)
    every, said = list[Score](), list[str]()

    def show(plan: EvaluationPlan, result: StageResult, scores: list[Score]) -> None:
        name = plan.protocol.name
        rows = [score_cells(score) for score in scores]
        key = f"settings-{name}" if len(plans) > 1 else "settings"
        services.observer.table(key, f"Protocol {name}", SCORE_COLUMNS, rows)
        every.extend(scores)
        what = "All scores of the model, with published scores"
        services.observer.page("scores", what, lambda: score_tables_markdown(services.root, every))
        text = sentence(headline(scores)) + (" (evaluated before)" if result.reused else "")
        said.append(f"{name}: {text}" if len(plans) > 1 else text)

    evaluate_in_turn(plans, services, show)
    return "; ".join(said)


@vitline_flow("predict")
def predict(spec: PredictionSpec, services: Services, this: FlowRun) -> str:
    """Predicts the classes of all images of a corpus with a published model."""
    from vitline.flows.runs.predict_classes import predict_classes, prediction_rows, prediction_sentence

    result = predict_classes(spec, services)
    services.observer.table("predictions", spec.run_key, ["field", "value"], prediction_rows(spec, result))
    return prediction_sentence(spec, result)


@vitline_flow("pretrain-then-transfer", as_requested)
def pretrain_then_transfer_flow(request: PipelineRequest, services: Services, this: FlowRun) -> str | State:
    """Prepares, pre-trains and evaluates. Finished stages are reused. A scheduled run is a night, with its scheduled start in the keys."""
    if not this.scheduled:
        this = replace(this, night_by_hand=night_by_hand(request.overrides, this.due))
    with night_on_record(request, services, this):
        return night_or_pipeline(request, services, this)


def night_or_pipeline(request: PipelineRequest, services: Services, this: FlowRun) -> str | State:
    skip_if_late(request, this)
    plan = resolve_pipeline(services.root, request, this.night)
    if this.scheduled and plan.nights.night is not None:
        raise ValueError(
            f"nights.night={plan.nights.night!r} is for runs that a person starts, and this one has the night of its schedule. Leave it "
            "out of the schedule's request."
        )
    from vitline.flows.plans.budget import check_deadline
    from vitline.flows.runs.end_to_end import pretrain_then_transfer

    services.observer.say(f"pipeline {plan.key}: {check_deadline(services.root, plan)}")
    if plan.note:
        services.observer.say(plan.note)
    if this.night is not None:
        with failures_logged(services):
            from vitline.flows.nights.plan import plan_text

            services.observer.say(plan_text(open_store(services.root), request.name, this.night, plan.nights))
    with one_at_a_time(services, this):
        if request.deadline_hours is not None:
            services.observer.deadline = time.monotonic() + 3600 * request.deadline_hours
        result = pretrain_then_transfer(plan, services)
    show_pipeline(result, services)
    reused = all(stage.reused for stage in result.record.stages)
    again = "" if this.night else "; nights.night=now makes it a further night"
    scores = sentence(result.record.metrics) + (f" (every stage finished before{again})" if reused else "")
    verdict = result.night.verdict if result.night else None
    if result.night is None or verdict is None:
        return scores
    with failures_logged(services, "an alert could not be sent"):
        alert_better_night(result.night, promotes=plan.nights.promote)
    # By this name, automations of Prefect can send an alert.
    name = verdict.word.capitalize() if verdict.word in ("worse", "broken") else None
    return State(type=StateType.COMPLETED, name=name, message=f"{verdict.sentence} ({scores})")


@vitline_flow("reconcile")
def reconcile_flow(request: ReconcileRequest, services: Services, this: FlowRun) -> str:
    """Brings what killed processes left to an end state, and sends MLflow what it lacks."""
    from vitline.flows.on_prefect.old_flow_runs import NOTHING_TO_DO
    from vitline.flows.on_prefect.prefect_runs import PrefectFlowRuns
    from vitline.flows.ops.reconcile import reconcile

    findings = reconcile(request, services, PrefectFlowRuns(services.settings.project), patient=True)
    if not request.dry_run:
        with failures_logged(services, "alerts or the home page could not be written"):
            from vitline.flows.on_prefect.home.prefect_home import write_home

            write_home(services.settings, send_alerts(request, services))
    return show_findings(services, "reconciled", findings) or NOTHING_TO_DO["reconcile"]


@vitline_flow("collect-garbage")
def collect_garbage_flow(request: CollectGarbageRequest, services: Services, this: FlowRun) -> str:
    """Deletes what is no longer needed, a week after it has listed it."""
    from vitline.flows.on_prefect.old_flow_runs import NOTHING_TO_DO, delete_old_flow_runs
    from vitline.flows.ops.collect_garbage import collect_garbage

    findings = collect_garbage(request, services, partial(delete_old_flow_runs, services.settings.project))
    return show_findings(services, "garbage", findings) or NOTHING_TO_DO["collect-garbage"]


@flow(name="vitline-doctor", persist_result=False)
def doctor_flow(written: str, project: str, there: dict[str, str], uses: list[str]) -> State:
    """Says what flow runs of a work pool find. `vitline ops doctor` starts it, and deletes it if nothing is wrong."""
    from vitline.flows.ops.flow_run_checks import seen_by_flow_run

    ok, found = seen_by_flow_run(written, project, there, uses)
    return State(type=StateType.COMPLETED if ok else StateType.FAILED, message=found)


def alert_better_night(night: "NightRecord", *, promotes: bool) -> None:
    """Sends Prefect an event for a night that is better than the champion and does not become it."""
    from vitline.flows.on_prefect.alerts.automations import emit

    assert night.verdict is not None
    better = any(one.who == "champion" and one.word == "better" for one in night.verdict.against)
    if better and night.gate is not None and not (night.gate.passed and promotes):
        why = night.gate.reason if not night.gate.passed else "It passes the gate, and people promote in this series."
        emit("gate-refused", night.pipeline or night.name, f"{night.sentence} {why}")


def send_alerts(request: ReconcileRequest, services: Services) -> list[str]:
    """Sends Prefect an event for every new problem that needs a person; returns the sentences of all that are there."""
    from vitline.flows.on_prefect.alerts.automations import emit
    from vitline.flows.on_prefect.alerts.problems import notify_new

    def tell(problem: "Problem") -> None:
        services.observer.say(problem.text)
        emit(problem.kind, problem.subject, problem.text)

    jobs = services.cluster.jobs.list() if services.settings.ray_address else []
    limits = {"stalled_minutes": request.stalled_minutes, "min_free_bytes": 1e9 * request.min_free_gb}
    return [problem.text for problem in notify_new(services.settings, open_store(services.root), jobs, tell, **limits)]


def show_findings(services: Services, key: str, findings: "list[Finding]") -> str:
    """Shows and logs the findings; returns their number as text, or an empty string."""
    if not findings:
        return ""
    count = f"{len(findings)} finding{'s' * (len(findings) != 1)}"
    services.observer.table(key, count, list(findings[0]._fields), [list(finding) for finding in findings])
    for finding in findings:
        services.observer.say(f"{finding.subject} {finding.problem}: {finding.action}")
    return count


def skip_if_late(request: PipelineRequest, this: FlowRun) -> None:
    """Raises Skipped for a night that starts too late: it would overlap with the next one."""
    limit, late = request.max_late_hours, this.late_hours()
    if this.scheduled and limit is not None and late > limit:
        raise Skipped(f"due {this.due:%Y-%m-%d %H:%M} UTC, {late:.2g} h ago; max_late_hours is {limit:g}.")


@contextlib.contextmanager
def night_on_record(request: PipelineRequest, services: Services, this: FlowRun) -> Iterator[None]:
    """Notes the nights before that were missed. At the end, shows the verdict; of a night that was late, skipped or refused, notes
    why. Nothing of it fails the night."""
    if (night := this.night) is None:
        yield
        return
    from vitline.flows.nights.night_page import night_markdown
    from vitline.flows.nights.night_record import read_night
    from vitline.flows.nights.not_run import note_missed, note_not_run

    root = open_store(services.root)
    with failures_logged(services):
        note_missed(root, request.name, night, this.due_between)
    try:
        yield
    except (Skipped, ValueError) as error:
        with failures_logged(services):
            late = this.late_hours() > (request.max_late_hours or float("inf"))
            note_not_run(root, request.name, night, this.origin, error, late=late)
        raise
    finally:
        with failures_logged(services):
            record = read_night(root, request.name, night)
            if record is not None:
                services.observer.page(
                    "verdict", f"Verdict of the night of {night_text(night)}", lambda: night_markdown(record)
                )


@contextlib.contextmanager
def failures_logged(
    services: Services, failed: str = "the record of this night could not be written or shown"
) -> Iterator[None]:
    """Whatever is wrong with the record or an alert is logged."""
    try:
        yield
    except Exception as error:
        services.observer.say(f"{failed}: {error}")


@contextlib.contextmanager
def one_at_a_time(services: Services, this: FlowRun) -> Iterator[None]:
    """Raises Skipped if a scheduled run would overlap with an earlier one of its deployment, or with a job that it left."""
    if not this.scheduled or this.deployment is None:
        yield
        return
    with exclusively(services, this.deployment.replace("/", "-"), what="the night"):
        for job in services.cluster.jobs.list({"deployment": this.deployment}):
            if not job.terminal:
                where = job.metadata.get("flow_run_url") or services.cluster.jobs.page(job.id)
                raise Skipped(still_running(f"job {job.id} of a night", job.started_at or time.time(), where))
        yield


def show_pipeline(result: "PipelineResult", services: Services) -> None:
    """Shows the tables and links of a finished pipeline."""
    from vitline.flows.on_prefect.home.address import home_url
    from vitline.flows.reports.report import SCORE_COLUMNS, score_rows, stage_time

    record = result.record
    rows = [[s.stage, s.what, stage_time(s), s.run_key or "-"] for s in record.stages]
    services.observer.table("stages", f"Stages of {record.key}", ["stage", "what", "time", "run"], rows)
    services.observer.table("scores", "Top-1 on test, read once", list(SCORE_COLUMNS), score_rows(result.scores))
    links = {"pipeline": f"`{record.key}`", "report": f"`{record.report}`", "model": f"`{record.model}`"}
    if url := services.sender.pipeline_url(record.key):
        page = url.split("?")[0]
        links |= {
            "MLflow": f"[the pipeline]({url})",
            "report page": f"[in MLflow]({page}/artifacts/report.html)",
        }
    for stage in record.stages:
        if stage.run_key and (url := services.sender.run_url(stage.run_key)):
            links[f"MLflow, {stage.stage}"] = f"[{stage.run_key}]({url})"
    if home := home_url(services.settings):
        links["home"] = f"[what needs a person, nights, active runs]({home})"
    services.observer.links("links", f"Links of {record.key}", links)


def sentence(metrics: Mapping[str, float]) -> str:
    """`val/top1 41.2 %, tasks/digits/top1 69.6 %`"""
    return ", ".join(f"{name} {percent(value)}" for name, value in metrics.items()) or "no scores"
