"""What a training will take: steps, epochs, compute and memory, before it starts. No mathematics of its own."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from vitline.flows.plans.held_out import held_out
from vitline.infra.html.text import num_bytes
from vitline.infra.storage import open_store
from vitline.vit.config import SpikeGuardConfig, TrainConfig, TrainRecipe
from vitline.vit.cost.estimate import ASSUMED, GPUS_PER_NODE, PlanGpus, demand_of, flops_per_image

if TYPE_CHECKING:
    from vitline.vit.corpora.training_corpora import TrainingCorpora
    from vitline.vit.run.resolved import ResolvedTraining

DEVICES = {
    "auto": "auto: a GPU for each worker if the cluster has GPUs or its autoscaler can add some, else a CPU",
    "cuda": "cuda: a GPU for each worker; waits for GPUs",
    "cpu": "cpu",
}


class TrainingCorpus(TypedDict):
    """The corpus of a training."""

    name: str
    digest: str
    images: int
    """Rows of the split that is trained on."""
    classes: int


class MixedCorpusCost(TypedDict):
    """A corpus of a mixture."""

    version: str
    digest: str
    share: float
    """Fraction of the examples."""
    images: int
    """Rows of the split that is trained on, without those of dropped classes."""
    epochs: float
    classes: int
    classes_dropped: int


class TrainingCost(TypedDict):
    """What a training will take."""

    config_digest: str
    corpus: TrainingCorpus
    steps: int
    images: int
    """Images to train on, counting repeats."""
    epochs: float
    loss: str
    """The loss, and the labels of the corpus."""
    held_out: str
    """What the training is scored on, or why its score is missing or meaningless."""
    warning: NotRequired[str]
    """The same, where it should be known before anything is spent."""
    forward_gflop_per_image: float
    training_exaflop: float
    workers: int
    device: str
    reading: dict[str, Any]
    """The fields of `vitline.vit.input.plan.OrderPlan`."""
    loading: str
    """What a worker reads ahead, in how many threads it reads and decodes, and whether this machine has the native decoder."""
    spike_guard: NotRequired[str]
    """What the training does at a spike, where its recipe has a guard."""
    bandwidth: str
    """What the store must send so that no GPU waits."""
    start: NotRequired[str]
    """What is taken from where, unless the training starts from random weights."""
    mixture: NotRequired[dict[str, MixedCorpusCost]]
    """The corpora of a mixture by name."""


def training_cost(training: "ResolvedTraining", gpus: PlanGpus = ASSUMED) -> TrainingCost:
    """Steps, epochs, compute, reading and memory of a training, before it starts.

    Raises ValueError for a GPU whose peak is not known, and for lanes, workers or batch that do not fit the corpus.
    """
    from vitline.vit.models.flops import forward_flops

    config, corpora, recipe = training.config, training.corpora, training.config.recipe
    reading = reading_plan(config, corpora)
    rows = [part.num_rows(config.split) for part in corpora.parts]
    images = recipe.total_steps * recipe.input.global_batch_size
    scored_on = held_out(config, corpora)
    cost: TrainingCost = {
        "config_digest": config.config_digest,
        "corpus": {
            "name": " + ".join(part.title for part in corpora.parts),
            "digest": corpora.digest,
            "images": sum(rows),
            "classes": corpora.num_classes,
        },
        "steps": recipe.total_steps,
        "images": images,
        "epochs": images / sum(rows),
        "loss": loss_text(recipe, single_label=corpora.single_label),
        "held_out": scored_on.text,
        "forward_gflop_per_image": forward_flops(recipe.model, corpora.num_classes) / 1e9,
        "training_exaflop": flops_per_image(recipe, corpora.num_classes) * images / 1e18,
        "workers": config.execution.num_workers,
        "device": DEVICES[config.execution.device],
        "reading": reading,
        "loading": loading_text(
            config,
            high_latency=any(part.store.high_latency for part in corpora.parts),
            open_bytes=reading["open_memory_bytes"],
        ),
        "bandwidth": bandwidth_text(config, corpora.num_classes, bytes_per_image(config.split, corpora), gpus),
    }
    if not scored_on.is_telling:
        cost["warning"] = f"{cost['corpus']['name']}: {scored_on.text}"
    if start := start_text(training):
        cost["start"] = start
    if recipe.spike_guard.action != "off":
        cost["spike_guard"] = guard_text(recipe.spike_guard)
    if corpora.classes is not None:
        cost["mixture"] = {
            part.title: {
                "version": part.manifest.version,
                "digest": part.manifest.digest,
                "share": share,
                "images": num_rows,
                "epochs": images * share / num_rows,
                "classes": part.manifest.num_classes,
                "classes_dropped": part.num_dropped,
            }
            for part, share, num_rows in zip(corpora.parts, corpora.shares, rows, strict=True)
        }
    return cost


def start_text(training: "ResolvedTraining") -> str:
    """What a training takes from its parent or initial model, and what is new; empty where it starts from random weights."""
    config, corpora, theirs, record = training.config, training.corpora, training.parent, training.initial
    if config.parent is not None and theirs is not None:
        from vitline.vit.run.branch import differences

        step = config.parent.step
        changed = differences(theirs.config.recipe, config.recipe)
        return (
            f"network, optimizer, averages and position in the reading order from step {step:,} of {theirs.run_key}; "
            f"{config.recipe.total_steps - step:,} steps are left; {f'changed: {changed}' if changed else 'nothing is changed'}"
        )
    if config.init_model is None or record is None:
        return ""
    from vitline.vit.published.model_record import read_classes

    store = open_store(config.init_model)
    title = f"{'/'.join(store.uri.rstrip('/').split('/')[-2:])} (digest {record['digest'][:12]})"
    same = config.stage == "pretrain" and read_classes(store, record) == corpora.class_names()
    same &= record["model"].get("pre_logits", False) == getattr(config.recipe.model, "pre_logits", False)
    head = "with its head" if same else f"with a new head for {corpora.num_classes:,} classes"
    return f"weights of {title}, {head}; optimizer, averages and reading order begin anew"


def loss_text(recipe: TrainRecipe, *, single_label: bool) -> str:
    if (patches := recipe.masked_patches) is not None:
        return f"{patches.target} of masked patches, {patches.rate:.0%} of each image; labels are not used"
    return f"{recipe.loss}, for {'one label' if single_label else 'several labels'} per image"


def guard_text(guard: SpikeGuardConfig) -> str:
    """The spike guard of a recipe in words."""
    done = "leaves the update out"
    if guard.action == "rewind":
        done = f"goes back and leaves out the updates of {guard.rewind_steps:,} steps before and after"
    slower = f", then {guard.lr_factor:g} of the learning rate for {guard.lr_steps:,} steps" if guard.lr_steps else ""
    return (
        f"{guard.action}: where loss or gradient norm stands {guard.threshold:g} spreads above the median of {guard.window_steps:,} steps, "
        f"the training {done}{slower}; more than {guard.max_spikes:,} spikes in {guard.max_spikes_steps:,} steps end it"
    )


def reading_plan(config: TrainConfig, corpora: "TrainingCorpora") -> dict[str, Any]:
    """The fields of `OrderPlan`: of several corpora the memory of all, the fewest proposed lanes, else the worst of each."""
    from vitline.vit.input.mixture import Mixture
    from vitline.vit.input.plan import plan_order

    recipe = config.recipe
    if corpora.classes is not None:  # raises for weights that do not fit the batch
        Mixture([p.weight for p in corpora.parts], seed=recipe.seed, global_batch_size=recipe.input.global_batch_size)
    plans = [
        plan_order(
            part.order(config.split, recipe.input, recipe.seed),
            world_size=config.execution.num_workers,
            mean_row_group_bytes=part.manifest.mean_row_group_bytes(config.split),
        )
        for part in corpora.parts
    ]
    together: Mapping[str, Callable[[Iterable[Any]], Any]] = {
        "open_memory_bytes": sum,
        "proposed_num_lanes": min,
        "min_lanes_per_rank": min,
    }
    return {
        name: together.get(name, max)(getattr(plan, name) for plan in plans) for name in plans[0].__dataclass_fields__
    }


def bytes_per_image(split: str, corpora: "TrainingCorpora") -> float:
    """Stored bytes of a mean example, the corpora weighted by their shares."""
    return sum(
        share * part.manifest.mean_row_group_bytes(split) / part.manifest.split(split).rows_per_row_group
        for part, share in zip(corpora.parts, corpora.shares, strict=True)
    )


def loading_text(config: TrainConfig, *, high_latency: bool, open_bytes: int) -> str:
    """How a worker loads: memory of what it reads ahead, and threads, with the origin of each, and the decoder of this machine."""
    from vitline.vit.input.decoding.how_many import THREADS_PER_PROCESS, decode_processes
    from vitline.vit.input.decoding.which_decoder import native_is_installed
    from vitline.vit.input.load_queue import max_concurrent_loads

    execution = config.execution
    lanes = config.recipe.input.num_lanes // execution.num_workers
    processes = decode_processes(execution.decode_processes, threads=execution.decode_threads, lanes=lanes)
    if processes > lanes:
        raise ValueError(
            f"execution.decode_processes={processes} must be at most {lanes}, the lanes of each of {execution.num_workers} workers, "
            f"because a process decodes whole lanes. Set fewer, or more lanes (recipe.input.num_lanes={config.recipe.input.num_lanes})."
        )

    def origin(field: str) -> str:
        is_default = getattr(execution, field) == type(execution).model_fields[field].default
        return f"execution.{field}, {'its default' if is_default else 'as the recipe or --set has it'}"

    why = f"; one for every {THREADS_PER_PROCESS} threads" if execution.decode_processes == "auto" else ""
    ahead = execution.read_ahead_bytes
    enough = (
        f"a steady stream needs {num_bytes(open_bytes)}"
        if ahead >= open_bytes
        else f"less than the {num_bytes(open_bytes)} of a steady stream"
    )
    return (
        f"a worker reads {num_bytes(ahead)} ahead at most ({origin('read_ahead_bytes')}; {enough}), in as many threads as it needs up to "
        f"{max_concurrent_loads(high_latency)} ({'a remote store' if high_latency else 'files'}), and decodes in "
        f"{execution.decode_threads} ({origin('decode_threads')}) of {_processes(processes)} ({origin('decode_processes')}{why}); "
        f"the native decoder is {'' if native_is_installed() else 'not '}installed on this machine"
    )


def _processes(number: int) -> str:
    if number == 0:
        return "its own process"
    return "1 input process" if number == 1 else f"{number} input processes"


def bandwidth_text(config: TrainConfig, num_classes: int, image_bytes: float, gpus: PlanGpus) -> str:
    """Bytes per second of a node of up to eight GPUs, each at the rate of `demand_of`. On CPUs arithmetic is the limit."""
    if config.execution.device == "cpu":
        return f"{num_bytes(image_bytes)} an image"
    need, number = demand_of(config.recipe, num_classes, gpus), min(config.execution.num_workers, GPUS_PER_NODE)
    rate = need.images_per_s * number
    node = "with 1 GPU" if number == 1 else f"of {number} GPUs"
    return (
        f"{num_bytes(rate * image_bytes)}/s for a node {node}: {rate:,.0f} images/s, each {need.gpu} at {need.mfu:.0%} of its "
        "peak; `vitline data bench` measures it"
    )
