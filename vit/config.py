"""Configs of training: results depend on `recipe`; `execution` is how they are computed.

Imports neither torch nor Ray, so forms, plans and flows can validate a config on any machine.
"""

from math import log
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from vitline.infra.config import FrozenConfig, digest_of, digested_as, omitted_at_default
from vitline.vit.input.config import InputConfig
from vitline.vit.models.config import (
    ActivationCheckpointing,
    AnyNetworkConfig,
    Frozen,
    NetworkConfig,
    PatchTarget,
    TransformerConfig,
    ViTConfig,
)
from vitline.vit.models.user_code import is_reference

Loss = Literal["softmax", "sigmoid"]
Precision = Literal["float32", "bfloat16"]


def loss_for(*, single_label: bool) -> Loss:
    """The loss that suits a corpus: softmax for one label per image, sigmoid for several."""
    return "softmax" if single_label else "sigmoid"


def head_bias_for(loss: Loss, num_classes: int) -> float:
    """The initial bias of a new head: 0 for softmax. For sigmoid every class starts as likely as one of `num_classes` is by chance
    (-10 for the 21k classes of the paper), so that the first gradients do not only push all classes down."""
    # A chance of 1/2, of two classes, is -0.0 without the sum, which has another digest than 0.0.
    return 0.0 if loss == "softmax" else 0.0 - round(log(max(1, num_classes - 1)), 2)


class UpdateConfig(FrozenConfig):
    """The optimizer, and which weights it trains at which share of the learning rate."""

    optimizer: str = "adamw"
    """AdamW (`adamw`, pre-training), SGD with momentum (`sgd`, fine-tuning), or a class as PACKAGE.MODULE:NAME, such as
    torch.optim:Adafactor."""
    optimizer_options: dict[str, Any] = omitted_at_default({})
    """Keyword arguments of such a class: JSON values by name. Learning rate and weight decay are fields of their own."""
    optimizer_scope: Literal["all", "hidden-matrices"] = omitted_at_default("all")
    """What such a class trains: all weights, or the matrices of the blocks only, as torch.optim:Muon does. AdamW then trains the other
    weights: embeddings, norms, biases and the head."""
    optimizer_source: str = omitted_at_default("")
    """Digest of the Python files of the package of such a class. It is filled in when a training is planned; torch has none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment, or the momentum of SGD."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added outside the square root."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, multiplied by the learning rate (by a class, as that applies it); applied to matrices and convolutions only."""
    layer_decay: float = omitted_at_default(1.0, gt=0, le=1)
    """Factor of the learning rate from each layer to the one below it: block i of L learns at `layer_decay` ** (L + 1 - i) of the rate,
    the embeddings at that of block 0, and final norm, pooling and head at the whole rate (arXiv:2106.08254, 2111.06377)."""
    frozen: Frozen = omitted_at_default("none")
    """What is not trained: `embeddings` (all that is before the first block), as many of the first blocks as a number says with the
    embeddings, or the `backbone` (all but the head). These weights have neither gradients nor moments."""
    head_first_steps: NonNegativeInt = omitted_at_default(0)
    """First steps of the training, in which only the head is trained, at `peak_lr`. The schedule begins after them (linear probing, then
    fine-tuning: arXiv:2202.10054). No gradients are computed below the head in them, unless the network is split over workers."""

    @field_validator("frozen", mode="before")
    @classmethod
    def _check_frozen(cls, frozen: Any) -> Any:
        if frozen in ("none", "embeddings", "backbone") or (type(frozen) is int and frozen > 0):
            return frozen
        raise ValueError("must be 'none', 'embeddings', 'backbone' or a number of blocks")

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, optimizer: str) -> str:
        if optimizer not in ("adamw", "sgd") and not is_reference(optimizer):
            raise ValueError("must be 'adamw', 'sgd', or a class as PACKAGE.MODULE:NAME, such as torch.optim:Adafactor")
        return optimizer

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        unused: tuple[str, ...] = ()
        if not is_reference(self.optimizer):
            unused = ("optimizer_options", "optimizer_scope")
        elif self.optimizer_scope == "all":
            unused = ("beta1", "beta2", "eps")
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} has no effect with optimizer={self.optimizer!r}. Leave it out.")
        for name, owner in {"params": "frozen", "lr": "the learning rate", "weight_decay": "weight_decay"}.items():
            if name in self.optimizer_options:
                raise ValueError(f"optimizer_options has {name!r}, which {owner} of the recipe sets. Leave it out.")
        return self

    @model_validator(mode="after")
    def _check_trained(self) -> Self:
        for name in ("layer_decay", "head_first_steps"):
            value = getattr(self, name)
            if self.frozen == "backbone" and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} has no effect with frozen='backbone', which trains the head only. Leave it out."
                )
        return self


def check_layers(optim: UpdateConfig, model: NetworkConfig) -> None:
    """Raises ValueError for layers that the network does not have."""
    if optim.layer_decay < 1 and not model.num_blocks:
        raise ValueError(
            f"optim.layer_decay={optim.layer_decay} needs a network whose layers are known, not {model.summary}. Leave it out."
        )
    # On CPUs torch's GroupNorm crashes in the backward pass if its input needs no gradient, as behind frozen blocks of a ResNet.
    if optim.frozen not in ("none", "backbone") and not isinstance(model, TransformerConfig):
        raise ValueError(
            f"optim.frozen={optim.frozen} needs a Vision Transformer or a hybrid, not {model.summary}. Freeze the backbone, or nothing."
        )
    if optim.optimizer_scope == "hidden-matrices" and (
        not isinstance(model, TransformerConfig) or optim.frozen in ("backbone", model.num_blocks)
    ):
        raise ValueError(
            f"optim.optimizer_scope=hidden-matrices needs a Vision Transformer or a hybrid with blocks that are trained, not "
            f"{model.summary} with optim.frozen={optim.frozen}. Leave it out, or train blocks."
        )
    if isinstance(optim.frozen, int) and optim.frozen > model.num_blocks:
        raise ValueError(
            f"optim.frozen={optim.frozen} is more than the {model.num_blocks} blocks of the network, {model.summary}."
        )


class OptimConfig(UpdateConfig):
    """Optimizer and schedule; the schedule is a function of the step alone."""

    peak_lr: PositiveFloat = 1e-3
    """Learning rate at the end of warmup."""
    warmup_steps: NonNegativeInt = 10_000
    """Optimizer steps of linear warmup from a learning rate of zero."""
    schedule: Literal["cosine", "linear", "staircase"] = "cosine"
    """Shape of the decay after warmup: cosine or linear from the peak to `end_lr`, or a staircase that divides the learning
    rate by ten at each of `milestones`."""
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = digested_as("falls_at", (), field="milestones")
    """Fractions of the training after which the staircase schedule falls (BiT: 0.3, 0.6, 0.9)."""
    end_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step of a cosine or linear schedule (1e-5 in the paper's code for linear)."""
    decay_steps: PositiveInt | None = omitted_at_default(None)
    """Steps that the schedule is made for, where the training has another length. None: `total_steps`."""
    cooldown_steps: NonNegativeInt = omitted_at_default(0)
    """Last steps of the training, in which the learning rate falls linearly to zero from where the schedule has it when they begin.
    0: the schedule continues to the end."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; longer gradients are scaled down. None turns clipping off."""

    def frozen_at(self, step: int) -> Frozen:
        """What is not trained at a step."""
        return "backbone" if step <= self.head_first_steps else self.frozen

    @property
    def steps_to_peak(self) -> int:
        """Those of the head alone and of the warmup."""
        return self.head_first_steps + self.warmup_steps

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.schedule == "staircase") != bool(self.milestones):
            raise ValueError(
                f"schedule={self.schedule!r} with milestones={self.milestones}: the staircase schedule needs milestones, such as "
                "(0.3, 0.6, 0.9), and other schedules do not use it."
            )
        if self.schedule == "staircase" and self.end_lr:
            raise ValueError(f"end_lr={self.end_lr} has no effect with schedule='staircase'. Leave it out.")
        return self


class SpikeGuardConfig(FrozenConfig):
    """Leaves out the updates of steps whose loss or gradient norm stands far above their own recent values."""

    action: Literal["off", "skip", "rewind"] = "off"
    """`skip`: the update of such a step is left out. `rewind`: the training also goes back to a checkpoint before the spike and
    leaves out the updates around it, as in PaLM. `off`: every finite update is applied."""
    threshold: PositiveFloat = 10.0
    """Loss or gradient norm is a spike above the median of the window plus so many times its spread (1.4826 times the median
    absolute deviation, and at least 2 % of the median)."""
    window_steps: int = Field(128, ge=8)
    """Number of latest applied updates whose losses and gradient norms are compared with. Nothing is a spike before half of them
    were applied."""
    rewind_steps: PositiveInt = 100
    """With `rewind`: updates to leave out before the spike, and as many after it."""
    lr_factor: float = Field(1.0, gt=0, le=1)
    """Factor of the learning rate in the `lr_steps` steps after a spike."""
    lr_steps: NonNegativeInt = 0
    """Number of steps after the updates that a spike leaves out in which `lr_factor` applies."""
    max_spikes: PositiveInt = 10
    """Most spikes in `max_spikes_steps` steps. One more ends the run as diverged."""
    max_spikes_steps: PositiveInt = 1_000
    """Number of latest steps in which `max_spikes` are allowed."""

    @property
    def steps_back(self) -> int:
        """How many updates before a spike are left out, and as many after it; 0 unless the training rewinds."""
        return self.rewind_steps if self.action == "rewind" else 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        unused = {"off": type(self).model_fields.keys() - {"action"}, "skip": {"rewind_steps"}, "rewind": set[str]()}[
            self.action
        ]
        for name in sorted(unused):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"spike_guard.{name}={value!r} has no effect with spike_guard.action={self.action!r}. Leave it out, or set the "
                    f"action to {'skip or rewind' if self.action == 'off' else 'rewind'}."
                )
        if (self.lr_factor < 1) != (self.lr_steps > 0):
            raise ValueError(
                f"spike_guard.lr_factor={self.lr_factor:g} with spike_guard.lr_steps={self.lr_steps} has no effect. Set both, such as "
                "0.5 for 200 steps, or neither."
            )
        return self


class MaskedPatchConfig(FrozenConfig):
    """Masked patch prediction: the network predicts corrupted patches, without labels (arXiv:2010.11929, Sec. 4.6 and B.1.2)."""

    target: PatchTarget = "mean-color-3bit"
    """What is predicted of a corrupted patch: its mean colour of 3 bits a channel, that of 4 x 4 parts, or all its pixels."""
    rate: float = Field(0.5, gt=0, le=1)
    """Share of the patches that are corrupted. Of these 80 % become the mask token, 10 % another patch of the image."""


class TrainRecipe(FrozenConfig):
    """All settings that can change a weight by more than rounding. They are part of the run key."""

    model: AnyNetworkConfig = ViTConfig()
    """The network."""
    input: InputConfig = InputConfig()
    """Reading order, batch size and augmentation."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    loss: str = "softmax"
    """Softmax cross-entropy, sigmoid cross-entropy summed over classes (for several labels per image), or a user-defined function as
    PACKAGE.MODULE:NAME: logits (B, K), targets (B, K) -> losses (B,)."""
    loss_source: str = omitted_at_default("")
    """Digest of the Python files of the package of such a function. It is filled in when a training is planned."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over all classes."""
    total_steps: PositiveInt
    """Number of optimizer steps."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, reading order, augmentation and dropout."""
    precision: Precision = "float32"
    """Precision of matrix products; weights, softmax, norms, head and loss stay float32. With `bfloat16` a GPU may use TF32 for these,
    with `float32` for nothing."""
    average_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of the Polyak average of the weights (0.9999 in the paper). If set, the average is scored and published."""
    spike_guard: SpikeGuardConfig = omitted_at_default(SpikeGuardConfig())
    """What happens at a spike of the loss or the gradient norm."""
    masked_patches: MaskedPatchConfig | None = omitted_at_default(None)
    """Pre-training without labels, in place of the loss of classes. The published network is to be fine-tuned: its head is not trained."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: str) -> str:
        if loss not in get_args(Loss) and not is_reference(loss):
            raise ValueError("must be 'softmax', 'sigmoid', or a user-defined function as PACKAGE.MODULE:NAME")
        return loss

    @model_validator(mode="after")
    def _check(self) -> Self:
        optim = self.optim
        first = f"optim.warmup_steps={optim.warmup_steps}"
        if optim.head_first_steps:
            first = f"optim.head_first_steps={optim.head_first_steps} with {first}"
        if optim.steps_to_peak >= self.total_steps:
            raise ValueError(
                f"{first} must be less than total_steps={self.total_steps}; "
                "otherwise the learning rate does not reach its peak before the end."
            )
        if optim.steps_to_peak + optim.cooldown_steps > self.total_steps:
            raise ValueError(
                f"optim.cooldown_steps={optim.cooldown_steps} with {first} are more than "
                f"total_steps={self.total_steps}, so the cooldown would begin within the warmup. Use fewer steps for them."
            )
        if optim.decay_steps is not None and optim.decay_steps <= optim.steps_to_peak:
            raise ValueError(
                f"optim.decay_steps={optim.decay_steps} must be more than {first}: it counts from the first step."
            )
        check_layers(optim, self.model)
        if self.masked_patches is not None:
            self._check_masked_patches()
        if self.input.augment.image_size_px != self.model.image_size_px:
            raise ValueError(
                f"input.augment.image_size_px={self.input.augment.image_size_px} must equal "
                f"model.image_size_px={self.model.image_size_px}."
            )
        return self

    def _check_masked_patches(self) -> None:
        if not isinstance(self.model, ViTConfig) or self.model.pool == "map" or self.model.pre_logits:
            raise ValueError(
                f"masked_patches needs a Vision Transformer with pool=token or gap and without pre_logits, not {self.model.summary}: "
                "an attention pool or a layer before the head would not be trained."
            )
        for name in ("loss", "label_smoothing"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value!r} has no effect with masked_patches, which uses no labels. Leave it out."
                )


class CheckpointProbeConfig(FrozenConfig):
    """Scores of the network during the training, on features of committed checkpoints: nearest neighbours, and few-shot least squares. A
    task of its own computes them, which the training never waits for."""

    every_steps: NonNegativeInt = 0
    """Steps from one probe to the next. A probe scores the newest checkpoint, so there are at most as many as checkpoints. 0: none."""
    corpora: tuple[str, ...] = ()
    """Corpora with one label per image to probe on, each a NAME, NAME/VERSION or URI: examples come from its split `train`, and `val` is
    scored. None named: those of the training."""
    images: PositiveInt = 5_000
    """Most images of each of the two splits: the first ones, whose order is random in a corpus."""
    shots: PositiveInt = 10
    """Examples of each class of the few-shot score; of a class with fewer among these images all."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What computes the features: CPUs, or a GPU that the training does not use."""
    cpus: PositiveInt = 1
    """CPUs that the task asks Ray for, and threads that it uses. Beside a training on CPUs it asks for none and runs with low priority."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if changed and not self.every_steps:
            raise ValueError(
                f"probes.{changed[0]}={getattr(self, changed[0])!r} has no effect without probes.every_steps. Set that, too, such as to "
                "5000, or leave it out."
            )
        return self


NCCL_VARIABLES = """
    ALGO BUFFSIZE CROSS_NIC CUMEM_ENABLE DEBUG DEBUG_SUBSYS IB_DISABLE IB_GID_INDEX IB_HCA IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_TC
    IB_TIMEOUT MAX_NCHANNELS MIN_NCHANNELS NET_GDR_LEVEL NVLS_ENABLE P2P_DISABLE P2P_LEVEL PROTO SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME
    SOCKET_NTHREADS
"""
NETWORK_VARIABLES = frozenset(
    [
        *(f"NCCL_{name}" for name in NCCL_VARIABLES.split()),
        "GLOO_SOCKET_IFNAME",
        "FI_PROVIDER",
        "FI_EFA_USE_DEVICE_RDMA",
    ]
)
"""Variables of NCCL, gloo and libfabric that a config may set. Not those that name files or libraries, which a worker would load."""


class PlacementConfig(FrozenConfig):
    """Which nodes of a Ray cluster the workers of a training run on, and what each of them reserves."""

    accelerator_type: str | None = None
    """Use GPUs of this type only, by Ray's name for it, such as H100. None: of any."""
    node_labels: dict[str, str] = Field(default={})
    """Use nodes with these labels only, as in {"pool": "training"}. `ray start --labels` sets them."""
    one_domain: str | None = None
    """A label of which all workers' nodes have the same value, such as `rack`: gradients then stay inside one rack. Each attempt takes
    the smallest value with enough free room, else waits for the largest. None: workers may be anywhere."""
    cpus_per_worker: NonNegativeInt | None = None
    """CPUs that a worker reserves, so that other jobs leave them to it. None: one for each of `decode_threads`; on a Ray of one node that
    a command has started, one for a worker without a GPU."""
    strategy: Literal["pack", "spread"] = "pack"
    """Where there is a choice: workers on as few nodes as possible, or on as many."""
    environment: dict[str, str] = Field(default={})
    """Variables of the network libraries in the workers, as in {"NCCL_SOCKET_IFNAME": "eth0"}."""

    @field_validator("environment")
    @classmethod
    def _check(cls, value: dict[str, str]) -> dict[str, str]:
        if others := sorted(value.keys() - NETWORK_VARIABLES):
            raise ValueError(
                f"placement.environment may not set {others[0]}. Allowed are {', '.join(sorted(NETWORK_VARIABLES))}; set others where the "
                "nodes are started."
            )
        return value


class ExecutionConfig(FrozenConfig):
    """How a training is computed. No setting here changes its results by more than rounding."""

    num_workers: PositiveInt = 1
    """Number of Ray Train workers, each with one GPU or one CPU."""
    min_workers: PositiveInt | None = None
    """Fewest workers to train with: the training starts with what the cluster has free, continues with fewer after the loss of a machine,
    and grows to `num_workers` after a checkpoint, once there is room. None: exactly `num_workers`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` waits until every worker has a GPU (see `queue_timeout_s`); `cpu` uses CPUs only; `auto` uses GPUs if the
    cluster has some or its autoscaler can add some, else CPUs."""
    placement: PlacementConfig = PlacementConfig()
    """Which nodes of a cluster the workers run on."""
    priority: int = 0
    """Where other trainings of the same root have the room, this one stops those of lower priority, the lowest first and of several the
    one that began last. They save a checkpoint and resume once there is room."""
    micro_batch_size: PositiveInt | Literal["auto"] = 64
    """Most examples per forward pass of one worker. Gradients of several micro-batches are accumulated for a step. `auto`: on a GPU
    as many as fit, measured with the network when the workers start; on a CPU 64."""
    decode_threads: PositiveInt = 1
    """Threads per worker that decode and augment images, those of all its input processes together."""
    decode_processes: NonNegativeInt | Literal["auto"] = 0
    """Processes per worker in which these threads decode the batches of a training, because those of one process wait for Python's
    interpreter lock; 0 for the worker's own. `auto`: one for every four threads, where there are more than four. `vitline data bench`
    measures what they feed, and advises a number where threads wait for the lock."""
    decoded_cache_bytes: NonNegativeInt = 256 * 2**20
    """Memory per worker that caches decoded images, in bytes; speeds up small corpora."""
    read_ahead_bytes: NonNegativeInt = 2**31
    """Most memory per worker for row groups that are read before their turn, in bytes. As much as the open row groups need
    (`vitline pretrain run --plan` shows it) lets the store send a steady stream; with less, batches wait where blocks end."""
    shard_cache_dir: str | None = None
    """Folder on a local disk, such as /mnt/nvme or ~/cache, in which each machine caches the row groups that it reads from a
    remote store, so that later epochs need not read them there. Used for corpora on S3 only; None caches nothing."""
    shard_cache_bytes: PositiveInt = 2**36
    """Most bytes in that folder, for all workers of a machine together."""
    compile: bool = False
    """Compile the model with torch.compile. Worth it on GPUs only."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What is computed again in the backward pass to save memory: nothing, all of each block but its input (`full`), or what costs
    little, all but matrix products, convolutions and attention (`selective`). For networks or micro-batches that do not fit."""
    sharding: Literal["none", "fsdp", "hsdp"] = "none"
    """Split weights, gradients and moments over all workers (`fsdp`), or over those of each machine (`hsdp`), for networks that one GPU
    cannot hold; `none`: each worker holds them whole. Checkpoints are the same, so a run may change it."""
    log_every_steps: PositiveInt = 10
    """Steps between two reports of metrics."""
    save_every_steps: PositiveInt = 1_000
    """Steps between two checkpoints."""
    evaluate_every_steps: NonNegativeInt = 0
    """Steps between two scores of the validation split during the training, on all workers; they change nothing in the training. 0:
    only at its end."""
    probes: CheckpointProbeConfig = CheckpointProbeConfig()
    """Scores of committed checkpoints during the training; they change nothing in it."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every_images: PositiveInt | None = None
    """Besides the newest, keep for ever the first regular checkpoint after each so many images seen, such as 100000000. None: only
    the newest."""
    keep_best: bool = False
    """Besides the newest, keep the checkpoint with the best top-1 of the validation split (of several labels the mean average precision,
    of masked patches their accuracy). Needs `evaluate_every_steps`, at steps that are saved."""
    inspect_images: NonNegativeInt = 64
    """Number of validation images in the attention figures after pre-training; 0 draws no figures."""
    max_nonfinite_steps: NonNegativeInt = 5
    """Consecutive steps that may be skipped for a non-finite gradient before the run ends as diverged."""
    max_bad_fraction: float = Field(1e-4, ge=0, le=1)
    """Largest share of bad examples (images of the corpus that cannot be decoded any more) among those read since the workers
    started; ten in each epoch are always allowed. More end the run as failed; 0 does so at the first."""
    max_restarts_without_progress: PositiveInt = 3
    """Restarts of the worker group from one checkpoint before the run ends as failed."""
    progress_timeout_s: PositiveFloat | None = 1_800.0
    """Seconds without any progress (a batch, a step, bytes of a checkpoint; loading and compiling count as one) after which a
    worker counts as hung: it records the stacks of its threads and is killed, and the workers start again from the newest
    checkpoint. Must be longer than the slowest step and the loading of a checkpoint. None never ends a worker."""
    on_cancel: Literal["checkpoint", "discard"] = "checkpoint"
    """What a cancelled training does: write a checkpoint, from which the same request resumes, or discard the steps since
    the last checkpoint and stop at once."""
    grace_s: PositiveFloat = 30.0
    """Seconds from a stop request to the end of the process; the final checkpoint must fit into them."""
    queue_timeout_s: PositiveFloat = 600.0
    """Seconds that a run without a checkpoint waits at most for the resources of the worker group. A run with a checkpoint waits
    until there is room."""
    lease_timeout_s: PositiveFloat = 30.0
    """Seconds for which the heartbeat of an attempt that Ray does not know must be unchanged before it counts as dead."""

    @property
    def planned_micro_batch(self) -> int:
        """What plans count with, and CPUs use: the number, or 64 for `auto`."""
        return 64 if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def fewest_workers(self) -> int:
        return self.min_workers or self.num_workers

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(
                f"min_workers={self.min_workers} is more than num_workers={self.num_workers}. Give at most that, or more workers."
            )
        if self.keep_best and (not self.evaluate_every_steps or self.evaluate_every_steps % self.save_every_steps):
            raise ValueError(
                f"keep_best needs a score of checkpoints, but evaluate_every_steps={self.evaluate_every_steps} is no multiple of "
                f"save_every_steps={self.save_every_steps}. Set both, such as to {self.save_every_steps}."
            )
        if self.placement.accelerator_type and self.device == "cpu":
            raise ValueError(
                f"placement.accelerator_type={self.placement.accelerator_type!r} asks for GPUs, but device=cpu for none. Leave one of "
                "them out."
            )
        if self.shard_cache_dir is not None and not self.shard_cache_dir.startswith(("/", "~")):
            raise ValueError(
                f"shard_cache_dir={self.shard_cache_dir!r} is not an absolute path. Give one that starts with / or ~, on a local "
                "disk of the workers, whose current folder is another one."
            )
        return self


class MixedCorpus(FrozenConfig):
    """A corpus of a mixture."""

    corpus: str
    """URI of a prepared corpus."""
    weight: PositiveFloat = 1.0
    """Its share of the examples is its weight divided by the sum of all weights, exactly."""


class MixtureConfig(FrozenConfig):
    """Several corpora that are trained on at the same time, with the classes of one class map."""

    corpora: tuple[MixedCorpus, ...] = Field(min_length=2)
    """The corpora in the order in which their classes are numbered."""
    class_map: str = "names"
    """Which class of the mixture each class of each corpus is. `names`: classes of one name are one class. `prefixed`: every class
    of every corpus is one of its own, named CORPUS/CLASS. Else the URI of a class table."""


class ParentCheckpoint(FrozenConfig):
    """The checkpoint of another run that a training continues from: with its network, optimizer, averages and position."""

    run: str
    """URI of the parent's folder, `<root>/runs/<run key>`."""
    step: PositiveInt
    """Step of the checkpoint."""
    allow: tuple[str, ...] = ()
    """Fields, or groups of fields, in which the recipe may differ from the parent's, such as `recipe.optim.peak_lr`."""


class TrainConfig(FrozenConfig):
    """One training run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """First part of the run key and name of the published model: lower-case letters, digits, dashes."""
    stage: Literal["pretrain", "finetune"] = "pretrain"
    """Kind of the run."""
    corpus: str
    """URI of a prepared corpus; of a mixture the first one."""
    mixture: MixtureConfig | None = None
    """All corpora of a mixture; None for one corpus."""
    split: str = "train"
    """Split to train on."""
    val_split: str | None = "val"
    """Split that is scored at the end, and every `execution.evaluate_every_steps`, in all corpora that have it; None scores nothing."""
    init_model: str | None = None
    """URI of the published model to start from; None starts from random weights."""
    parent: ParentCheckpoint | None = None
    """The checkpoint of another run to continue from; None starts at step 0."""
    recipe: TrainRecipe
    """Settings that results depend on."""
    execution: ExecutionConfig = ExecutionConfig()
    """Settings that only change how results are computed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mixture is not None and self.mixture.corpora[0].corpus != self.corpus:
            raise ValueError(
                f"corpus={self.corpus!r} must be the first corpus of the mixture, which is {self.mixture.corpora[0].corpus!r}."
            )
        if self.parent is not None and self.parent.step >= self.recipe.total_steps:
            raise ValueError(
                f"recipe.total_steps={self.recipe.total_steps} must be more than {self.parent.step}, the step of the parent's "
                "checkpoint: it counts from the first step of the parent. Set a larger one."
            )
        if self.execution.num_workers > self.recipe.input.num_lanes:
            raise ValueError(
                f"execution.num_workers={self.execution.num_workers} is more than "
                f"recipe.input.num_lanes={self.recipe.input.num_lanes}, so a worker would have nothing to read. "
                "Use fewer workers or more lanes."
            )
        if is_reference(optimizer := self.recipe.optim.optimizer) and self.execution.sharding != "none":
            raise ValueError(
                f"not supported: execution.sharding={self.execution.sharding} with recipe.optim.optimizer={optimizer}, which would see "
                "slices of the weights. Set execution.sharding=none, or use adamw or sgd."
            )
        return self

    @property
    def config_digest(self) -> str:
        return digest_of(self.recipe)
