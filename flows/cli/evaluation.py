"""Runs and plans evaluations for the command line."""

from collections.abc import Mapping
from typing import Any

from vitline.flows import console
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.flows.plans.evaluation_cost import TaskCost, task_costs
from vitline.flows.runs.evaluate_tasks import SCORE_COLUMNS, evaluate_tasks, evaluation_spec, score_cells
from vitline.flows.runs.services import open_services
from vitline.infra.config import digest_of
from vitline.infra.settings import Settings
from vitline.vit.cost.estimate import PlanGpus, hours_of
from vitline.vit.evaluation.packing import SMALLEST_GPU_BYTES, packed
from vitline.vit.evaluation.probes import Probe


def score_and_show(settings: Settings, request: EvaluateRequest, *, as_json: bool) -> None:
    """Evaluates one published model on tasks and prints the scores."""
    plan = resolve_evaluate(settings.root, request)
    if plan.note:
        console.say(plan.note)
    with open_services(settings) as services:
        _, result, scores = evaluate_tasks("scores", plan, services)
    if as_json:
        console.emit({"reused": result.reused, "scores": [score.model_dump(mode="json") for score in scores]})
        return
    seeds = (
        f"seeds {request.seed} to {request.seed + request.num_seeds - 1}"
        if request.num_seeds > 1
        else f"seed {request.seed}"
    )
    title = f"Protocol {plan.protocol.name}, {seeds}"
    show_table(title, SCORE_COLUMNS, [score_cells(score) for score in scores])


def plan_and_show(settings: Settings, request: EvaluateRequest, gpus: PlanGpus, *, as_json: bool) -> None:
    """Prints the plan on such GPUs."""
    plan = resolve_evaluate(settings.root, request)
    if plan.note:
        console.say(plan.note)
    if plan.keep_models:
        evaluation_spec("plan", plan, settings.root)  # refuses what the evaluation would
    tasks = task_costs(settings.root, plan)
    rate = gpus.flops("float32" if isinstance(plan.protocol, Probe) else plan.protocol.precision)
    memory = gpus.gpu.memory_bytes or SMALLEST_GPU_BYTES
    total: dict[str, Any] = {
        "protocol": plan.protocol.name,
        "trainings": sum(task.trainings for task in tasks),
        "finished": sum(task.finished for task in tasks),
        "trained_images": sum(task.trained_images for task in tasks),
        "scored_images": sum(task.scored_images for task in tasks),
        "exaflop": sum(task.flop for task in tasks) / 1e18,
        "kept_bytes": sum(task.kept_bytes for task in tasks),
        "device_hours": hours_of(sum(task.flop for task in tasks), rate),
    }
    networks = {digest_of(task.recipe.model): task.recipe for task in tasks if task.recipe}
    if networks:
        trials, micro_batches, fits = zip(*(packed(recipe, memory) for recipe in networks.values()), strict=True)
        total |= {"trials_per_gpu": min(trials), "micro_batch": min(micro_batches), "fits": all(fits)}
    if gpus.hour_price is not None:
        total["usd"] = total["device_hours"] * gpus.hour_price
    if as_json:
        shown = [
            {name: value for name, value in vars(task).items() if name != "recipe"} | {"loss": task.loss}
            for task in tasks
        ]
        console.emit({"total": total, "tasks": shown})
        return
    rows = [_row(task, rate) for task in tasks]
    show_table(f"Protocol {plan.protocol.name}", list(rows[0]), [list(row.values()) for row in rows])
    console.print_result(_sentence(total, rate, gpus))


def _row(task: TaskCost, rate: float) -> dict[str, str]:
    return {
        "task": task.task,
        "init": task.start,
        "seed": f"{task.seed}",
        "trainings": f"{task.trainings}",
        "finished": f"{task.finished}",
        "images to train on": f"{task.trained_images:,}",
        "to evaluate": f"{task.scored_images:,}",
        "GPU-hours": f"{hours_of(task.flop, rate):.2f}",
        "loss": task.loss,
    }


def _sentence(total: Mapping[str, Any], rate: float, gpus: PlanGpus) -> str:
    left = total["trainings"] - total["finished"]
    text = (
        f"{left} trainings of {total['trainings']} are left: {total['trained_images']:,} images to train on, "
        f"{total['scored_images']:,} to evaluate, {total['exaflop']:.3g} exaFLOP; {total['device_hours']:.2f} GPU-hours at "
        f"{rate / 1e12:.3g} TFLOP/s, {gpus.mfu:.0%} of the peak of {gpus.name}"
    )
    if "usd" in total:
        text += f", {total['usd']:,.2f} USD"
    kept = f" The models to keep take {total['kept_bytes'] / 1e6:,.2f} MB." if total["kept_bytes"] else ""
    return f"{text}.{_packing(total) if left else ''} Decoding is not counted.{kept}"


def _packing(total: Mapping[str, Any]) -> str:
    """How the trainings use the memory of a GPU."""
    if not total["fits"]:
        return " Not one image of these trainings fits into the memory of a GPU, by the plan; name a larger one with --gpu."
    at_a_time = f"up to {total['trials_per_gpu']} of these trainings at a time, with micro-batches of"
    return f" A GPU runs {at_a_time} {total['micro_batch']} images or more."
