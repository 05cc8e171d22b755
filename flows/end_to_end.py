"""The map of the project: raw corpus -> shards -> pre-trained model -> fine-tuned scores -> comparison. Read it first.

Each stage is a Ray job under a claim, found again by its key: a second run reuses what is finished.
"""

import time
from dataclasses import dataclass, field, replace
from datetime import date

from data_prep.config import CorpusConfig
from flows.evaluate_tasks import evaluate_tasks
from flows.prepare_corpus import PreparedCorpus, prepare_corpora
from flows.pretrain import pretrain
from flows.report import Curve, Plot, ReportPage, StageRow, render
from flows.stage import Cluster, run_store
from infra.journal import read_journal
from infra.storage import Store, open_store
from vit.config import ExecutionConfig, TrainConfig, TrainRecipe
from vit.vtab.evaluate import EvaluationSpec, Score, TaskRef, plan_contests
from vit.vtab.protocols import Protocol
from vit.vtab.trials import finished_result


@dataclass(frozen=True)
class PipelineConfig:
    """What a pretrain-then-transfer run is made of. `budgets_s` are the stated seconds of prepare, pre-train, transfer."""

    name: str
    pretrain_corpus: CorpusConfig
    task_corpora: tuple[CorpusConfig, ...]
    recipe: TrainRecipe
    execution: ExecutionConfig
    protocol: Protocol
    seed: int = 0
    night: date | None = None
    budgets_s: tuple[float | None, float | None, float | None] = (None, None, None)


@dataclass
class PipelineResult:
    """What came out, for tables and the report."""

    config: PipelineConfig
    root: str
    stages: list[StageRow] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    model: str = ""
    run_key: str = ""
    report: str = ""
    corpora: list[PreparedCorpus] = field(default_factory=list)


def pretrain_then_transfer(config: PipelineConfig, root: str, cluster: Cluster) -> PipelineResult:
    """Prepare, pre-train, fine-tune with selection on validation, and score against the control from scratch."""
    result = PipelineResult(config, root)
    started = time.monotonic()
    source, *tasks = result.corpora = prepare_corpora([config.pretrain_corpus, *config.task_corpora], root, cluster)
    result.stages.append(prepare_row(result.corpora, config.budgets_s[0], time.monotonic() - started))

    training = TrainConfig(
        name=config.name,
        corpus=source.uri,
        val_split="val" if "val" in source.manifest.splits else None,
        recipe=config.recipe,
        execution=config.execution,
    )
    spec, trained = pretrain(training, root, cluster, config.night)
    result.run_key, result.model = spec.run_key, trained.state["model"]
    what = f"{trained.state['images_seen']:,} images in {trained.state['step']:,} steps, val {100 * trained.state['val_top1']:.1f} %"
    result.stages.append(
        StageRow(
            "pre-train", what, run_store(root, spec.run_key).uri, trained.wall_s, trained.reused, config.budgets_s[1]
        )
    )

    refs = tuple(TaskRef(name=task.manifest.name, corpus=task.uri) for task in tasks)
    evaluation, scored, result.scores = evaluate_tasks(
        f"{config.name}-transfer",
        refs,
        (result.model, None),
        config.recipe.model,
        config.protocol,
        root,
        cluster,
        config.seed,
    )
    what = f"{len(refs)} tasks x 2 starts, {sum(len(s.trials) for s in result.scores)} trainings"
    where = run_store(root, evaluation.run_key).uri
    result.stages.append(StageRow("transfer", what, where, scored.wall_s, scored.reused, config.budgets_s[2]))
    result.report = write_report(result, evaluation)
    return result


def prepare_row(corpora: list[PreparedCorpus], budget_s: float | None, wall_s: float) -> StageRow:
    counts = ", ".join(f"{c.manifest.name} {c.manifest.counts.num_accepted:,}" for c in corpora)
    refused = sum(c.manifest.counts.num_refused for c in corpora)
    what = f"{counts} images, {refused:,} refused"
    where = corpora[0].uri.rsplit("/", 2)[0]
    return StageRow("prepare", what, where, wall_s, all(c.reused for c in corpora), budget_s)


def write_report(result: PipelineResult, evaluation: EvaluationSpec) -> str:
    """Writes `<root>/reports/<run key>.html` and returns its URI; it opens without a server or network."""
    root = open_store(result.root)
    run = run_store(result.root, result.run_key)
    page = ReportPage(
        title=f"vitline: {result.config.name}",
        lead=f"Pre-trained on {result.corpora[0].manifest.name}, transferred to "
        + " and ".join(c.manifest.name for c in result.corpora[1:])
        + f". Run {result.run_key}, recipe {result.config.recipe.model.depth} blocks of width {result.config.recipe.model.embed_dim}.",
        stages=result.stages,
        scores=result.scores,
        plots=[*training_plots(run), *transfer_plots(root, evaluation)],
        inputs_png=run.read("inputs.png") if run.exists("inputs.png") else None,
        notes=(
            "Both starts take the same steps and choose from the same settings on validation. With so few test images a "
            "difference of a few points can be chance: the benchmark over seeds in the README says what holds.",
        ),
    )
    key = f"reports/{result.run_key}.html"
    root.write(key, render(page).encode())
    return root.uri_of(key)


def training_plots(run: Store) -> list[Plot]:
    """Loss, accuracy and learning rate of a run by step, from its journal."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in read_journal(run):
        points.setdefault(record.key, []).append((record.step, record.value))
    wanted = {
        "train/loss": "Pre-training loss",
        "train/top1": "Pre-training accuracy (of the batch)",
        "optim/lr": "Learning rate",
    }
    return [Plot(title, "step", [Curve(title, points[key])]) for key, title in wanted.items() if key in points]


def transfer_plots(root: Store, evaluation: EvaluationSpec) -> list[Plot]:
    """Loss of the final trainings, the model beside its control, one plot a task."""
    trials = root.child("trials")
    curves: dict[str, list[Curve]] = {}
    for contest in plan_contests(evaluation):
        selected = [
            result for trial in contest.select_trials() if (result := finished_result(trials, trial)) is not None
        ]
        if len(selected) < len(contest.settings):
            continue  # a score of an earlier run, whose trials were tidied away
        final = finished_result(trials, contest.final_trial(selected))
        if final is not None:
            name = "pre-trained" if contest.model else "from scratch"
            curves.setdefault(contest.task.name, []).append(Curve(name, final.train_losses))
    return [Plot(f"Fine-tuning loss on {task}", "step", lines) for task, lines in curves.items()]


def with_seed(config: PipelineConfig, seed: int) -> PipelineConfig:
    """The same pipeline with another seed of initialisation, order and augmentation."""
    recipe = TrainRecipe.model_validate(config.recipe.model_dump() | {"seed": seed})
    return replace(config, recipe=recipe, seed=seed)
