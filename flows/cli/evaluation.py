"""Runs and plans evaluations for the command line, and plans pipelines, of which they are a part."""

from collections.abc import Mapping
from typing import Any

from vitline.flows import console
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.evaluation_plan import EvaluationPlan, resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.plans.evaluation_cost import TaskCost, task_costs
from vitline.flows.plans.evaluation_spec import evaluation_spec
from vitline.flows.plans.transfer_plan import flops_of, memory_verdict, pipeline_cost, protocol_plan, sum_of
from vitline.flows.runs.evaluate_tasks import SCORE_COLUMNS, evaluate_in_turn, score_cells
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import StageResult
from vitline.infra.settings import Settings
from vitline.vit.cost.estimate import GPUS_PER_NODE, PlanGpus, hours_of
from vitline.vit.evaluation.evaluate import Score


def score_and_show(settings: Settings, request: EvaluateRequest, *, as_json: bool) -> None:
    """Evaluates one published model on tasks and prints the scores."""
    plans = resolve_evaluate(settings.root, request)
    if plans[0].note:
        console.say(plans[0].note)
    seeds = (
        f"seeds {request.seed} to {request.seed + request.num_seeds - 1}"
        if request.num_seeds > 1
        else f"seed {request.seed}"
    )
    done = list[tuple[StageResult, list[Score]]]()

    def show(plan: EvaluationPlan, result: StageResult, scores: list[Score]) -> None:
        done.append((result, scores))
        if not as_json:
            title = f"Protocol {plan.protocol.name}, {seeds}"
            show_table(title, SCORE_COLUMNS, [score_cells(score) for score in scores])

    try:
        with open_services(settings) as services:
            evaluate_in_turn(plans, services, show)
    finally:  # one that has failed hides no scores of the others
        if as_json and done:
            scores = [score.model_dump(mode="json") for _, of_protocol in done for score in of_protocol]
            console.emit({"reused": all(result.reused for result, _ in done), "scores": scores})


def plan_and_show(settings: Settings, request: EvaluateRequest, gpus: PlanGpus, *, as_json: bool) -> None:
    """Prints the plan on such GPUs: of each protocol, and their sum."""
    plans = resolve_evaluate(settings.root, request)
    if plans[0].note:
        console.say(plans[0].note)
    for plan in plans:
        if plan.keep_models:
            evaluation_spec("plan", plan, settings.root)  # refuses what the evaluation would
    features = set[str]()
    costs = [task_costs(settings.root, plan, features) for plan in plans]
    totals = [protocol_plan(plan.protocol, tasks, gpus) for plan, tasks in zip(plans, costs, strict=True)]
    if as_json:
        shown = [
            {name: value for name, value in vars(task).items() if name != "recipe"}
            | {"loss": task.loss, "protocol": plan.protocol.name}
            for plan, tasks in zip(plans, costs, strict=True)
            for task in tasks
        ]
        console.emit({"total": sum_of(totals), "protocols": totals, "tasks": shown})
        return
    for plan, tasks, total in zip(plans, costs, totals, strict=True):
        rate = flops_of(plan.protocol, gpus)
        rows = [_row(task, rate) for task in tasks]
        show_table(f"Protocol {plan.protocol.name}", list(rows[0]), [list(row.values()) for row in rows])
        console.print_result(_sentence(total, rate, gpus))
    if len(plans) > 1:
        console.print_result(f"All protocols: {hours_text(sum_of(totals))}.")


def hours_text(total: Mapping[str, Any]) -> str:
    """`2.31 GPU-hours, 5.78 USD`"""
    return f"{total['device_hours']:.2f} GPU-hours" + (f", {total['usd']:,.2f} USD" if "usd" in total else "")


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
        f"{total['scored_images']:,} to evaluate, {total['exaflop']:.3g} exaFLOP; {hours_text(total)} at {rate / 1e12:.3g} TFLOP/s, "
        f"{gpus.mfu:.0%} of the peak of {gpus.name}"
    )
    packing = f" Memory {memory_verdict(total, gpus)}. {_on_a_node(total)}" if left else ""
    kept = f" The models to keep take {total['kept_bytes'] / 1e6:,.2f} MB." if total["kept_bytes"] else ""
    return f"{text}.{packing} Decoding is not counted.{kept}"


def _on_a_node(total: Mapping[str, Any]) -> str:
    """`On a machine with 8 of them: 2.91 hours, each training on 2.`"""
    each = "each training on one" if total["gpus_per_trial"] == 1 else f"each training on {total['gpus_per_trial']}"
    return f"On a machine with {GPUS_PER_NODE} of them: {total['node_hours']:.2f} hours, {each}."


PLAN_COLUMNS = ("part", "GPU-hours", "hours", "memory")


def show_pipeline_plan(settings: Settings, plan: PipelinePlan, gpus: PlanGpus, *, as_json: bool) -> None:
    """Prints what a pipeline takes on such GPUs: its pre-training, each of its evaluations, and their sum."""
    cost = pipeline_cost(settings.root, plan, gpus)
    if as_json:
        console.emit({"pipeline": plan.key, **cost})
        return
    rows = [_evaluation_row(each, gpus) for each in cost["transfer"]]
    if training := cost.get("pretrain"):
        hours, workers = cost["pretrain_device_hours"], training["workers"]
        took = _hours_on(hours / workers, workers)
        rows.insert(0, ["pre-training", f"{hours:.2f}", took, training["memory_verdict"]])
    seeds = f", {cost['seeds']} seeds" if cost["seeds"] > 1 else ""
    show_table(f"Plan of {plan.key}{seeds}", PLAN_COLUMNS, rows)
    console.print_result(
        f"In all {hours_text(cost)} at {gpus.mfu:.0%} of the peak of {gpus.name}. Decoding is not counted."
    )
    if missing := cost["not_planned"]:
        console.print_result(f"Not in the plan, as they are not prepared yet: {', '.join(missing)}.")
    console.print_result(f"{cost['deadline'][0].upper()}{cost['deadline'][1:]}.")


def _evaluation_row(plan: Mapping[str, Any], gpus: PlanGpus) -> list[str]:
    took = _hours_on(plan["node_hours"], GPUS_PER_NODE)
    return [f"evaluation with {plan['protocol']}", f"{plan['device_hours']:.2f}", took, memory_verdict(plan, gpus)]


def _hours_on(hours: float, num_gpus: int) -> str:
    return f"{hours:.2f} on {num_gpus} GPU{'s' * (num_gpus > 1)}"
