"""models -> scores on tasks: all trials of all models in one Ray job. Several protocols are evaluations one after the other."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.evaluation_plan import EvaluationPlan
from vitline.flows.plans.evaluation_spec import evaluation_spec, planned_scores, weights_gone
from vitline.flows.reports.score_lines import setting
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import StageFailed, StageResult, run_stage, run_store
from vitline.infra.config import replace
from vitline.infra.html.text import and_list, percent
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import STOP_GRACE_S, EvaluationSpec, Score, init_text, kept_model
from vitline.vit.evaluation.trials import model_label
from vitline.vit.run.run_spec import read_progress


def evaluate_tasks(
    name: str, plan: EvaluationPlan, services: Services
) -> tuple[EvaluationSpec, StageResult, list[Score]]:
    """Runs the evaluation, or returns the finished one: one stored score per task, model and seed.

    Raises ValueError for a task that the protocol cannot use, or whose network is to be kept and is gone, before a job is
    submitted; StageFailed, Skipped.
    """
    spec = evaluation_spec(name, plan, services.root)
    run, begun = run_store(services.root, spec.run_key), has_scores(spec)
    for task in plan.tasks:
        if load_manifest(open_store(task.corpus)).num_classes == 1:
            services.observer.say(
                f"warning: {task.name} has one class, so that every score on it is 100 % and says nothing"
            )
    result = run_stage(
        services,
        spec,
        "vitline.vit.ray_jobs.task_driver",
        title=f"evaluate {name}/{plan.protocol.name}",
        progress=lambda: read_progress(run),
        grace_s=STOP_GRACE_S,
    )
    result = dataclasses.replace(result, resumed=result.resumed or begun)
    if gone := weights_gone(spec):  # an attempt of another request, which keeps none, was at work
        raise StageFailed(gone)
    scores = [Score.model_validate(score) for score in result.state["scores"]]
    if spec.keep_models:
        kept = (kept_model(open_store(services.root), score) for score in scores)
        services.observer.say(f"models kept: {', '.join(model_label(uri) for uri in dict.fromkeys(kept) if uri)}")
    return spec, result, scores


def evaluate_in_turn(
    plans: Sequence[EvaluationPlan],
    services: Services,
    show: Callable[[EvaluationPlan, StageResult, list[Score]], None],
) -> None:
    """Evaluates a model by each protocol, and shows each result as soon as it is there.

    Raises ValueError for what one of them cannot use, before the first job; StageFailed, Skipped.
    """
    by_protocol = {plan.protocol.name: plan for plan in plans}
    for plan in plans[1:]:
        evaluation_spec("scores", plan, services.root)

    def evaluate(protocol: str) -> None:
        _, result, scores = evaluate_tasks("scores", by_protocol[protocol], services)
        show(by_protocol[protocol], result, scores)

    one_after_another([*by_protocol], evaluate)


class ProtocolsFailed(StageFailed):
    """Of several protocols these have failed. The text names them and those that are scored."""

    def __init__(self, failed: Mapping[str, Exception], scored: Sequence[str]) -> None:
        recorded = f"The scores of {and_list(scored)} are recorded. " if scored else ""
        reasons = " ".join(f"The evaluation with {protocol} failed: {error}" for protocol, error in failed.items())
        super().__init__(f"{recorded}{reasons}")
        self.protocols = [*failed]


def one_after_another(protocols: Sequence[str], evaluate: Callable[[str], None]) -> None:
    """Evaluates by each protocol in turn. One that fails or is refused does not keep the next ones from their scores: where there are
    several, ProtocolsFailed names it at the end. Any other end, such as a stop, is the end of all."""
    failed: dict[str, Exception] = {}
    for protocol in protocols:
        try:
            evaluate(protocol)
        except (StageFailed, ValueError) as error:
            if len(protocols) == 1 or (isinstance(error, StageFailed) and error.state != "failed"):
                raise
            failed[protocol] = error
    if failed:
        raise ProtocolsFailed(failed, [protocol for protocol in protocols if protocol not in failed])


def has_scores(spec: EvaluationSpec) -> bool:
    """Whether a published model has one of the scores already. The control has all of its own wherever only the model is new."""
    models = tuple(model for model in spec.models if model is not None)
    root = open_store(spec.root)
    return any(root.exists(score.score_key) for score in planned_scores(replace(spec, models=models)))


SCORE_COLUMNS = ["task", "init", "top-1", "ECE", "test images", "chosen", "majority class"]


def score_cells(score: Score) -> list[str]:
    """A score as a row of SCORE_COLUMNS."""
    return [
        score.task,
        init_text(score.model_digest),
        percent(score.value),
        percent(score.calibration.ece) if score.calibration else "-",
        f"{score.num_examples:,}",
        setting(score.chosen),
        percent(score.majority_fraction),
    ]
