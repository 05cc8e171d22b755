"""models -> scores on tasks: all trials of all models in one Ray job."""

from flows.console import progress
from flows.pretrain import run_store
from flows.stage import Cluster, StageResult, run_stage
from infra.config import digest_of
from infra.keys import run_key
from vit.config import ViTConfig
from vit.run import read_progress
from vit.vtab.evaluate import EvaluationSpec, Score, TaskRef, plan_contests
from vit.vtab.protocols import Protocol


def evaluate_tasks(
    name: str,
    tasks: tuple[TaskRef, ...],
    models: tuple[str | None, ...],
    architecture: ViTConfig,
    protocol: Protocol,
    root: str,
    cluster: Cluster,
    seed: int = 0,
) -> tuple[EvaluationSpec, StageResult, list[Score]]:
    """One score per (task, model), stored and returned; None among `models` is the control, trained from scratch.

    Raises ValueError for a task that the protocol cannot use, before anything is spent; StageFailed, Skipped.
    """
    draft = EvaluationSpec(
        run_key="draft", tasks=tasks, models=models, architecture=architecture, protocol=protocol, seed=seed, root=root
    )
    contests = plan_contests(draft)
    inputs = {contest.score_key: contest.corpus_digest for contest in contests}
    key = run_key(name, "evaluate", digest_of([protocol, architecture, seed]), inputs)
    spec = draft.model_copy(update={"run_key": key})
    run = run_store(root, key)
    run.write_json("config.json", spec.model_dump(mode="json"))
    with progress(f"transfer {name}") as show:
        result = run_stage(
            run, key, "vit.ray_workers", cluster, on_poll=lambda: show(read_progress(run)), grace_s=10, claim_timeout_s=30
        )
    return spec, result, [Score.model_validate(score) for score in result.state["scores"]]
