"""models -> scores on tasks: all trials of all models in one Ray job."""

from flows import console
from flows.catalog import list_corpora
from flows.engines import Engines, engines
from flows.requests import EvaluateRequest
from flows.resolve import EvaluationPlan, resolve_evaluate
from flows.stage import StageResult, run_stage, run_store
from infra.config import digest_of, replace
from infra.keys import run_key
from infra.settings import Settings
from infra.storage import open_store
from vit.run_spec import read_progress
from vit.vtab.evaluate import EvaluationSpec, Score, list_scores, plan_contests
from vit.vtab.report import PUBLISHED, coverage, group_means, published_row, scores_by_model
from vit.vtab.tasks import VTAB_TASKS


def evaluate_tasks(
    name: str, plan: EvaluationPlan, engines: Engines
) -> tuple[EvaluationSpec, StageResult, list[Score]]:
    """One score per (task, model), stored and returned.

    Raises ValueError for a task that the protocol cannot use, before anything is spent; StageFailed, Skipped.
    """
    draft = EvaluationSpec(
        run_key="draft",
        tasks=plan.tasks,
        models=plan.models,
        architecture=plan.architecture,
        protocol=plan.protocol,
        seed=plan.seed,
        num_seeds=plan.num_seeds,
        root=engines.root,
    )
    contests = plan_contests(draft)
    inputs = {contest.score_key: contest.corpus_digest for contest in contests}
    key = run_key(name, "evaluate", digest_of([plan.protocol, plan.architecture, plan.seed, plan.num_seeds]), inputs)
    spec = replace(draft, run_key=key)
    run = run_store(engines.root, key)
    result = run_stage(
        engines,
        run,
        key,
        "vit.ray_workers",
        spec,
        title=f"transfer {name}",
        progress=lambda: read_progress(run),
        grace_s=10,
        claim_timeout_s=30,
    )
    return spec, result, [Score.model_validate(score) for score in result.state["scores"]]


def score_and_show(settings: Settings, request: EvaluateRequest, *, as_json: bool) -> None:
    """Scores one published model on tasks and prints the records."""
    plan = resolve_evaluate(settings.root, request)
    with engines(settings) as at_hand:
        _, result, scores = evaluate_tasks("scores", plan, at_hand)
    if as_json:
        console.emit({"reused": result.reused, "scores": [score.model_dump(mode="json") for score in scores]})
        return
    columns = ["task", "start", "top-1", "test images", "chosen", "one answer"]
    title = f"Protocol {request.protocol}, seed {request.seed}"
    console.table(title, columns, [score_cells(score) for score in scores], right=(2, 3, 5))


def score_cells(score: Score) -> list[str]:
    """A score as a row: task, start, top-1, test images, chosen setting, always giving one answer."""
    return [
        score.task,
        "pre-trained" if score.model_digest else "from scratch",
        console.percent(score.value),
        f"{score.num_examples:,}",
        f"lr {score.chosen['peak_lr']:g}, val {console.percent(score.chosen['val_top1'])}",
        console.percent(score.majority_fraction),
    ]


def show_scores(settings: Settings, *, as_json: bool) -> None:
    """Every stored score by model, VTAB means where they are whole, and the paper's rows."""
    ours = scores_by_model(list(list_scores(open_store(settings.root))))
    prepared = [row["name"] for row in list_corpora(settings.root)]
    if as_json:
        means = {label: group_means(row) for label, row in ours.items()}
        console.emit({"scores": ours, "means": means, "coverage": coverage(prepared)})
        return
    own_tasks = sorted({task for row in ours.values() for task in row} - {task.name for task in VTAB_TASKS})
    if ours and own_tasks:
        rows = [[label, *(_percent(row.get(task)) for task in own_tasks)] for label, row in ours.items()]
        console.table("Your tasks, top-1", ["model", *own_tasks], rows, right=tuple(range(1, len(own_tasks) + 1)))
    table = {**ours, **{f"{name}, published": published_row(name) for name in PUBLISHED}}
    table = {label: row for label, row in table.items() if any(task.name in row for task in VTAB_TASKS)}
    rows = [[task.name, task.group, *(_percent(row.get(task.name)) for row in table.values())] for task in VTAB_TASKS]
    for name in ("natural", "specialized", "structured", "all"):
        rows.append([name, "mean", *(_percent(group_means(row).get(f"vtab/{name}/top1")) for row in table.values())])
    console.table("VTAB-1k, top-1", ["task", "group", *table], rows, right=tuple(range(2, 2 + len(table))))
    console.tell(
        f"{coverage(prepared)}. A task is a corpus named vtab-<task> with splits train800, val200, "
        "train800val200 and test."
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else console.percent(value)
