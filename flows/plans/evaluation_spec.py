"""An `EvaluationPlan` -> the config of its job, with its run key."""

from collections.abc import Sequence

from vitline.flows.forms.evaluation_plan import EvaluationPlan
from vitline.infra.config import digest_of, replace
from vitline.infra.keys import run_key
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskSweep, plan_task_sweeps, without_weights
from vitline.vit.evaluation.probes import Probe
from vitline.vit.features.probe_trials import ProbeTrial, plan_probe_trials


def evaluation_spec(name: str, plan: EvaluationPlan, root: str) -> EvaluationSpec:
    """The config of the job, with its run key. Raises ValueError for a task or model that the protocol cannot use, and for a task
    whose network is to be kept and is gone."""
    draft = draft_spec(plan, root)
    if gone := weights_gone(draft):
        raise ValueError(gone)
    inputs = {score.score_key: score.corpus_digest for score in planned_scores(draft)}
    config_digest = digest_of([plan.protocol, plan.architecture, plan.seed, plan.num_seeds])
    return replace(draft, run_key=run_key(name, "evaluate", config_digest, inputs))


def draft_spec(plan: EvaluationPlan, root: str) -> EvaluationSpec:
    """The config without its run key: of a rescoring the repetition that is to come, or that was interrupted."""
    draft = EvaluationSpec(
        run_key="draft",
        tasks=plan.tasks,
        models=plan.models,
        architecture=plan.architecture,
        protocol=plan.protocol,
        seed=plan.seed,
        num_seeds=plan.num_seeds,
        root=root,
        keep_models=plan.keep_models,
    )
    return next_repetition(draft) if plan.rescore else draft


def planned_scores(spec: EvaluationSpec) -> Sequence[TaskSweep | ProbeTrial]:
    """The units that get one score each. Raises ValueError for a task or model that the protocol cannot use."""
    return plan_probe_trials(spec) if isinstance(spec.protocol, Probe) else plan_task_sweeps(spec)


def next_repetition(spec: EvaluationSpec) -> EvaluationSpec:
    """The spec with the first repetition that lacks a score: an interrupted rescoring resumes, unless it has lost a network that is
    to be kept."""
    root = open_store(spec.root)
    while all(root.exists(score.score_key) for score in planned_scores(spec)) or weights_gone(spec):
        spec = replace(spec, repetition=spec.repetition + 1)
    return spec


def weights_gone(spec: EvaluationSpec) -> str:
    """Which tasks were scored without a network that `spec` keeps, and what to do, as a sentence; empty if none were."""
    if not spec.keep_models:
        return ""
    gone = without_weights(open_store(spec.root), plan_task_sweeps(spec))
    if not gone:
        return ""
    tasks = ", ".join(dict.fromkeys(task_sweep.task.name for task_sweep in gone))
    return (
        f"There are no weights to keep of {tasks}: they were scored without keep_models, or the kept models were deleted. Train these "
        "tasks again with rescore (`--rescore`), or leave keep_models out."
    )
