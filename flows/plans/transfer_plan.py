"""What evaluations by one or several protocols, and a whole pipeline, will take on GPUs: hours, number of GPUs, and whether the trainings
fit into memory. Loads torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.find_corpus import Corpora, FoundCorpus
from vitline.flows.forms.evaluation_plan import EvaluationPlan, scored_models
from vitline.flows.forms.named_corpora import CorpusChoice, corpus_identity
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.forms.training_config import with_corpora
from vitline.flows.plans.budget import check_deadline
from vitline.flows.plans.evaluation_cost import MODEL_TO_COME, TaskCost, task_costs
from vitline.flows.plans.training_plan import TrainingPlan, training_plan
from vitline.infra.config import digest_of, replace
from vitline.infra.storage import open_store
from vitline.vit.cost.estimate import GPUS_PER_NODE, PlanGpus, hours_of
from vitline.vit.evaluation.evaluate import TaskRef
from vitline.vit.evaluation.packing import SMALLEST_GPU_BYTES, Gpus, packed, ranks_of, wall_seconds
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol

JSON = dict[str, Any]
SUMS = (
    "trainings",
    "finished",
    "trained_images",
    "scored_images",
    "exaflop",
    "kept_bytes",
    "device_hours",
    "node_hours",
    "usd",
)


def flops_of(protocol: Protocol | Probe, gpus: PlanGpus) -> float:
    """FLOP/s that one GPU reaches at the precision of a protocol."""
    return gpus.flops("float32" if isinstance(protocol, Probe) else protocol.precision)


def protocol_plan(protocol: Protocol | Probe, tasks: Sequence[TaskCost], gpus: PlanGpus) -> JSON:
    """The sums over tasks, the hours on one machine of 8 GPUs, and how trainings use these and their memory."""
    flop, rate = sum(task.flop for task in tasks), flops_of(protocol, gpus)
    plan: JSON = {
        "protocol": protocol.name,
        "trainings": sum(task.trainings for task in tasks),
        "finished": sum(task.finished for task in tasks),
        "trained_images": sum(task.trained_images for task in tasks),
        "scored_images": sum(task.scored_images for task in tasks),
        "exaflop": flop / 1e18,
        "kept_bytes": sum(task.kept_bytes for task in tasks),
        "device_hours": hours_of(flop, rate),
    }
    plan["node_hours"] = plan["device_hours"] / GPUS_PER_NODE
    networks = {digest_of(task.recipe.model): task.recipe for task in tasks if task.recipe}
    if networks:
        memory = gpus.gpu.memory_bytes or SMALLEST_GPU_BYTES
        trials, micro_batches, fits = zip(*(packed(recipe, memory) for recipe in networks.values()), strict=True)
        plan |= {"trials_per_gpu": min(trials), "micro_batch": min(micro_batches), "fits": all(fits)}
        node = Gpus(GPUS_PER_NODE, GPUS_PER_NODE, memory, rate)
        if left := plan["trainings"] - plan["finished"]:
            # The final training of a task waits for those that choose its setting.
            at_a_time = sum(max(task.trainings - 1, 1) for task in tasks if task.finished < task.trainings)
            plan["gpus_per_trial"] = ranks = ranks_of(next(iter(networks.values())), at_a_time, node)
            plan["node_hours"] = wall_seconds(3600 * plan["device_hours"] / left, left, node, ranks) / 3600
    if gpus.hour_price is not None:
        plan["usd"] = plan["device_hours"] * gpus.hour_price
    return plan


def sum_of(plans: Sequence[JSON]) -> JSON:
    """The sum of the plans of several protocols; a single one as it is."""
    if len(plans) == 1:
        return plans[0]
    total: JSON = {name: sum(plan[name] for plan in plans) for name in SUMS if name in plans[0]}
    return total | {"fits": all(plan.get("fits", True) for plan in plans)}


def memory_verdict(plan: Mapping[str, Any], gpus: PlanGpus) -> str:
    """`fits: up to 4 trainings at a time on a H200, with micro-batches of 64 images or more`"""
    if "fits" not in plan:
        return "fits: one forward pass over the images"
    if not plan["fits"]:
        return f"does not fit: not one image of these trainings fits into the memory of {gpus.name}, by the plan; name a larger GPU"
    at_a_time = f"up to {plan['trials_per_gpu']} trainings at a time on a {gpus.name}"
    return f"fits: {at_a_time}, with micro-batches of {plan['micro_batch']} images or more"


def pipeline_cost(root: str, plan: PipelinePlan, gpus: PlanGpus) -> JSON:
    """The plan of a pipeline: its pre-training, its transfer by protocol, their sum over all seeds, and its deadline.

    What a corpus decides that is not prepared yet is left out; `not_planned` names these corpora. Raises ValueError for what the
    protocols cannot use.
    """
    corpora = Corpora(open_store(root))
    sources = [_prepared(root, corpora, choice) for choice in plan.sources]
    tasks = [_prepared(root, corpora, choice) for choice in plan.tasks]
    transfer = _transfer(root, plan, [task for task in tasks if isinstance(task, FoundCorpus)], gpus)
    missing = [corpus.name for corpus in (*sources, *tasks) if isinstance(corpus, CorpusConfig)]
    cost: JSON = {"seeds": plan.nights.num_seeds, "transfer": transfer, "not_planned": missing}
    hours = sum(each["device_hours"] for each in transfer)
    known = [source for source in sources if isinstance(source, FoundCorpus)]
    if len(known) == len(sources):
        training = with_corpora(root, corpora, plan.training, plan.request, known)
        cost["pretrain"] = one = training_plan(training, gpus)
        cost["pretrain_device_hours"] = _training_hours(one, plan, gpus)
        hours += cost["pretrain_device_hours"]
    cost["device_hours"] = hours
    if gpus.hour_price is not None:
        cost["usd"] = hours * gpus.hour_price
    try:
        deadline = check_deadline(root, plan)
    except ValueError as refusal:  # a plan is shown all the same
        deadline = str(refusal).rstrip(".")
    return cost | {"deadline": deadline}


def _training_hours(training: TrainingPlan, plan: PipelinePlan, gpus: PlanGpus) -> float:
    """Of all seeds; of a long run those of its next part, and in each case with its cooldown."""
    nights, whole = plan.nights, training["images"]
    images = (nights.advance_images or whole * nights.num_seeds) + (nights.cooldown_images or 0)
    flop = 1e18 * training["training_exaflop"] * images / whole
    return hours_of(flop, gpus.flops(plan.training.recipe.precision))


def _prepared(root: str, corpora: Corpora, choice: CorpusChoice) -> FoundCorpus | CorpusConfig:
    """A corpus, or the request of one that is not prepared yet."""
    if isinstance(choice, str):
        return corpora.at(choice)
    try:
        return corpora.named(corpus_identity(root, corpora, choice))
    except ValueError:
        return choice


def _transfer(root: str, plan: PipelinePlan, tasks: Sequence[FoundCorpus], gpus: PlanGpus) -> list[JSON]:
    """The plan of each protocol, over all seeds, which are evaluated one after the other. The features of a model serve all probes."""
    plans = []
    counted = [set[str]() for _ in range(plan.nights.num_seeds)]
    for name, protocol in plan.protocols.items():
        costs = list[list[TaskCost]]()
        for nth, features in enumerate(counted):
            evaluation = EvaluationPlan(
                models=scored_models(MODEL_TO_COME, protocol, plan.request.from_scratch),
                tasks=tuple(TaskRef(name=task.manifest.name, corpus=task.store.uri) for task in tasks),
                architecture=plan.training.recipe.model,
                protocol=protocol,
                seed=plan.request.seed + nth,
            )
            costs.append(task_costs(root, evaluation, features))
        named = replace(protocol, name=name)
        of_all = protocol_plan(named, [cost for of_seed in costs for cost in of_seed], gpus)
        of_all["node_hours"] = sum(protocol_plan(named, of_seed, gpus)["node_hours"] for of_seed in costs)
        plans.append(of_all)
    return plans
