"""The HTML report of a pipeline, made from the runs of its stages: `<root>/reports/<key>.html`."""

from collections.abc import Sequence

from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.reports.report import render
from vitline.flows.runs.prepare_corpus import PreparedCorpus
from vitline.flows.runs.stage import run_store
from vitline.infra.html.plots import Plot, line_plot
from vitline.infra.html.text import and_list
from vitline.infra.runs.journal import read_journal
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, Score, final_result, init_text, plan_task_sweeps
from vitline.vit.evaluation.probes import Probe


def write_report(
    root: str,
    record: PipelineRecord,
    trained_on: Sequence[PreparedCorpus],
    transferred_to: Sequence[PreparedCorpus],
    scores: Sequence[Score],
    evaluations: Sequence[EvaluationSpec],
) -> str:
    """Writes the report and returns its URI. The page needs neither a server nor a network. `evaluations` are those of the first
    seed's model, one for each protocol that has ended."""
    store = open_store(root)
    trained = next(stage.run_key for stage in record.stages if stage.stage == "pretrain")
    run = run_store(root, str(trained))
    network = evaluations[0].architecture
    page = render(
        title=f"vitline: {record.key}",
        lead=f"Pre-trained on {_named(trained_on)}, transferred to {_named(transferred_to)}. Run {trained}, {network.summary}.",
        stages=record.stages,
        scores=scores,
        plots=[*training_plots(run), *(plot for each in evaluations for plot in transfer_plots(store, each))],
        inputs_png=run.read("inputs.png") if run.exists("inputs.png") else None,
        notes=(
            *_of_several(record),
            "The pre-trained model and the control from scratch take the same steps and choose from the same settings on "
            "validation. With few test images a difference of a few points can be noise; the README has results over seeds.",
        ),
    )
    key = f"reports/{record.key}.html"
    store.write(key, page.encode())
    return store.uri_of(key)


def _of_several(record: PipelineRecord) -> list[str]:
    """Of several protocols: the one that counts in comparisons, and those without scores."""
    if len(record.protocols) < 2:
        return []
    scored = {stage.protocol for stage in record.stages}
    to_come = [protocol for protocol in record.protocols if protocol not in scored]
    counts = f"With other pipelines, the scores of {record.verdict_protocol} are compared."
    return [f"{counts} There are no scores of {and_list(to_come)} so far." if to_come else counts]


def _named(corpora: Sequence[PreparedCorpus]) -> str:
    return " and ".join(corpus.manifest.name for corpus in corpora)


def training_plots(run: Store) -> list[Plot | None]:
    """Loss, accuracy and learning rate of a run by step, from its journal."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in read_journal(run):
        points.setdefault(record.key, []).append((record.step, record.value))
    wanted = {
        "train/loss": "Pre-training loss",
        "train/top1": "Pre-training accuracy (of the batch)",
        "optim/lr": "Learning rate",
    }
    return [line_plot(title, "step", {title: points[key]}) for key, title in wanted.items() if key in points]


def transfer_plots(root: Store, evaluation: EvaluationSpec) -> list[Plot | None]:
    """Loss of the final trials of model and control, one plot per task."""
    if isinstance(evaluation.protocol, Probe):
        return []
    curves: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for task_sweep in plan_task_sweeps(evaluation):
        # It names the final trial, also when the trials on validation are deleted.
        score = Score.load_or_none(root, task_sweep.score_key)
        if score is not None and (final := final_result(root, score)) is not None:
            curves.setdefault(task_sweep.task.name, {})[init_text(task_sweep.model)] = final.train_losses
    name = evaluation.protocol.name
    return [line_plot(f"Fine-tuning loss on {task}, {name}", "step", lines) for task, lines in curves.items()]
