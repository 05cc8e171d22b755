"""Configs of training: `recipe` is what the numbers depend on, `execution` how they are computed (DESIGN 3.3).

Imports neither torch nor Ray, so that a form, a plan or a flow can validate a config on any machine.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infra.config import FrozenConfig, digest_of
from vit.input.config import InputConfig
from vit.models.config import AnyNetworkConfig, ViTConfig


class OptimConfig(FrozenConfig):
    """Optimizer and schedule; the schedule is a function of the step alone."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Adam with decay relative to the learning rate (pre-training), or SGD with momentum (fine-tuning)."""
    peak_lr: PositiveFloat = 1e-3
    """Learning rate at the end of warmup."""
    warmup_steps: NonNegativeInt = 10_000
    """Optimizer steps of linear warmup from zero."""
    schedule: Literal["cosine", "linear", "staircase"] = "cosine"
    """Decay from the peak to `end_lr` over the remaining steps, or to a tenth at each of `falls_at`."""
    falls_at: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """Fractions of the training after which a staircase falls (BiT: 0.3, 0.6, 0.9)."""
    end_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step; the original's linear schedule ends at 1e-5."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First-moment decay of Adam, or the momentum of SGD."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second-moment decay of Adam."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon, outside the square root."""
    weight_decay: NonNegativeFloat = 0.0
    """Relative to the learning rate, on matrices and convolutions only."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; none to leave gradients as they are."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.schedule == "staircase") != bool(self.falls_at):
            raise ValueError(
                f"schedule={self.schedule!r} with falls_at={self.falls_at}: a staircase, and no other schedule, needs the "
                "fractions of the training at which it falls, as in (0.3, 0.6, 0.9)."
            )
        if self.schedule == "staircase" and self.end_lr:
            raise ValueError(f"end_lr={self.end_lr} has no effect with schedule='staircase'; leave it out.")
        return self


class TrainRecipe(FrozenConfig):
    """Everything that may change a weight by more than float rounding."""

    model: AnyNetworkConfig = ViTConfig()
    """The network."""
    input: InputConfig = InputConfig()
    """Order, batch and augmentation."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax cross-entropy, or sigmoid cross-entropy summed over classes (several labels an image)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes."""
    total_steps: PositiveInt
    """Optimizer steps."""
    seed: NonNegativeInt = 0
    """Of initialisation, order, augmentation and dropout."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of matrix products; weights, softmax, norms and loss stay float32."""
    average_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of averaged weights (the paper's Polyak factor is 0.9999); the average is what is published."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optim.warmup_steps >= self.total_steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of total_steps={self.total_steps}; "
                "the learning rate would never reach its peak."
            )
        if self.input.augment.image_size_px != self.model.image_size_px:
            raise ValueError(
                f"input.augment.image_size_px={self.input.augment.image_size_px} must equal "
                f"model.image_size_px={self.model.image_size_px}."
            )
        return self


class ExecutionConfig(FrozenConfig):
    """How the numbers are computed; nothing here changes them by more than float rounding."""

    num_workers: PositiveInt = 1
    """Ray Train workers, each with a GPU or a CPU of its own."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` waits until every worker has a GPU, for `queue_timeout_s` at most; `cpu` takes none; `auto` takes GPUs where the
    cluster has some or its autoscaler's node types can bring some, else CPUs."""
    micro_batch_size: PositiveInt = 64
    """Examples per forward pass of one worker; a batch is accumulated from them."""
    decode_threads: PositiveInt = 1
    """Threads of each worker that decode and augment."""
    decoded_cache_bytes: NonNegativeInt = 256 * 2**20
    """Memory of each worker for decoded pixels of small corpora."""
    compile: bool = False
    """torch.compile the model; pays on GPUs only."""
    log_every_steps: PositiveInt = 10
    """Cadence of metrics, and of the ranks' agreement to stop."""
    save_every_steps: PositiveInt = 1_000
    """Cadence of checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep."""
    inspect_images: NonNegativeInt = 64
    """Held-out images that the figures after pre-training show attention on; 0 draws none."""
    max_nonfinite_steps: NonNegativeInt = 5
    """Consecutive steps with a non-finite gradient, each skipped, before the run ends as diverged."""
    max_restarts_without_progress: PositiveInt = 3
    """Worker-group starts from one checkpoint before the run ends as failed."""
    on_cancel: Literal["checkpoint", "discard"] = "checkpoint"
    """What a cancelled training does first: write a checkpoint, so that the same request goes on from there, or discard
    what it did since the last one and leave at once."""
    grace_s: PositiveFloat = 30.0
    """Time from a stop request to the end of the process, checkpoint included."""
    queue_timeout_s: PositiveFloat = 600.0
    """Longest wait for the resources of the worker group."""
    claim_timeout_s: PositiveFloat = 30.0
    """Age of a heartbeat after which an attempt unknown to Ray counts as dead."""


class TrainConfig(FrozenConfig):
    """One training run: what `<root>/runs/<run key>/config.json` holds."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """First part of the run key: lower case, digits, dashes."""
    stage: Literal["pretrain", "finetune"] = "pretrain"
    """Which rules of resuming and reporting apply."""
    corpus: str
    """URI of a prepared corpus."""
    split: str = "train"
    """Split to train on."""
    val_split: str | None = "val"
    """Split scored once at the end; none to score nothing."""
    init_model: str | None = None
    """URI of the published model to start from; none starts from the initial distribution."""
    recipe: TrainRecipe
    """What the numbers depend on."""
    execution: ExecutionConfig = ExecutionConfig()
    """How they are computed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.execution.num_workers > self.recipe.input.num_lanes:
            raise ValueError(
                f"execution.num_workers={self.execution.num_workers} is more than "
                f"recipe.input.num_lanes={self.recipe.input.num_lanes}: a worker would have nothing to read."
            )
        return self

    @property
    def config_digest(self) -> str:
        return digest_of(self.recipe)
