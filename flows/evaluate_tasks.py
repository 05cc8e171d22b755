"""models -> scores on tasks: all trials of all models in one Ray job."""

from flows import console
from flows.catalog import find_corpus, find_model, list_corpora
from flows.console import progress
from flows.stage import Cluster, StageResult, run_stage, run_store
from infra.config import digest_of
from infra.keys import run_key
from infra.local.paths import log_dir
from infra.settings import Settings
from infra.storage import open_store
from vit.config import ViTConfig
from vit.run import read_progress
from vit.vtab.evaluate import EvaluationSpec, Score, TaskRef, list_scores, plan_contests
from vit.vtab.protocols import Protocol, protocol_named
from vit.vtab.report import PUBLISHED, coverage, group_means, published_row, scores_by_model
from vit.vtab.tasks import VTAB_TASKS


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
    with progress(f"transfer {name}") as show:
        result = run_stage(
            run,
            key,
            "vit.ray_workers",
            spec,
            cluster,
            on_poll=lambda: show(read_progress(run)),
            grace_s=10,
            claim_timeout_s=30,
        )
    return spec, result, [Score.model_validate(score) for score in result.state["scores"]]


def score_and_show(
    settings: Settings, model: str, tasks: list[str], protocol: str, seed: int, *, control: bool, as_json: bool
) -> None:
    """Scores one published model on tasks and prints the records; `control` adds the same network from scratch."""
    uri = find_model(settings.root, model)
    refs = []
    for task in tasks:
        corpus = find_corpus(settings.root, task)
        refs.append(TaskRef(name=corpus.read_json("manifest.json")["name"], corpus=corpus.uri))
    architecture = ViTConfig.model_validate(open_store(uri).read_json("config.json")["model"])
    models = (uri, None) if control else (uri,)
    with Cluster(settings, log_dir(settings), console.say) as cluster:
        _, result, scores = evaluate_tasks(
            "scores", tuple(refs), models, architecture, protocol_named(protocol), settings.root, cluster, seed
        )
    if as_json:
        console.emit({"reused": result.reused, "scores": [score.model_dump(mode="json") for score in scores]})
        return
    rows = [
        [
            s.task,
            "pre-trained" if s.model_digest else "from scratch",
            console.percent(s.value),
            f"{s.num_examples:,}",
            f"lr {s.chosen['peak_lr']:g}, val {console.percent(s.chosen['val_top1'])}",
            console.percent(s.majority_fraction),
        ]
        for s in scores
    ]
    columns = ["task", "start", "top-1", "test images", "chosen", "one answer"]
    console.table(f"Protocol {protocol}, seed {seed}", columns, rows, right=(2, 3, 5))


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
