"""Named fine-tuning protocols: each fixes resolution, resize, the settings to try and how one of them is chosen.

A protocol turns (architecture, facts of the task, seed) into the settings to try, each a complete TrainRecipe. The facts
are the number of training examples, the size of the images and the number of row groups. As VTAB demands, nothing else
depends on the task, except that BiT turns off flips and crops for some VTAB tasks.

The protocols of papers multiply matrices in bfloat16, on every device. Their authors trained on TPUs, which round float32 factors to
bfloat16 unless a program asks for more (docs.jax.dev, "Matmul precision"; jax-ml/jax issue 1856, of the year before the paper). Unlike
there, autocast keeps the products in bfloat16, too; weights, their updates and the loss are float32 in both.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vitline.infra.config import FrozenConfig, digest_of, digested_as, omitted_at_default, replace
from vitline.infra.names import did_you_mean
from vitline.vit.config import OptimConfig, Precision, TrainRecipe, UpdateConfig, head_bias_for, loss_for
from vitline.vit.evaluation.probes import PROBES, Probe
from vitline.vit.evaluation.tasks import vtab_task
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import NetworkConfig, ViTConfig, network_config

Steps = Annotated[
    tuple[PositiveInt, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int) else value),
]
"""One number of steps, or several to choose from."""


class TaskFacts(FrozenConfig):
    """The properties of a task that a protocol may use."""

    name: str
    """Name of the corpus."""
    num_train: int
    """Number of examples that the final trial trains on."""
    max_lanes: int
    """Number of row groups of the smallest training split, which limits the number of lanes."""
    mean_area_px: float
    """Mean area, in pixels, of the images of the first row group."""
    num_classes: PositiveInt
    """Number of classes."""
    single_label: bool
    """Whether each image has one label. Several labels are trained with the sigmoid loss."""


class LargerTask(FrozenConfig):
    """Settings that replace those of the protocol for tasks with many training examples."""

    at_least: PositiveInt
    """Smallest number of training examples for which these settings are used."""
    learning_rates: tuple[PositiveFloat, ...]
    """Learning rates to choose from."""
    total_steps: Steps
    """Numbers of steps to choose from."""
    warmup_steps: NonNegativeInt
    """Steps of linear warmup."""
    milestones: tuple[float, ...] | None = omitted_at_default(None)
    """Fractions of the training after which the staircase schedule falls. None: those of the protocol."""
    mixup_alpha: PositiveFloat | None = omitted_at_default(None)
    """MixUp of training images with shares from Beta(alpha, alpha). None: as `augment` of the protocol says."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps)
        return self


class SmallPictures(FrozenConfig):
    """The resolution for tasks whose images are small."""

    area_px: PositiveInt
    """Mean image area, in pixels, below which this resolution is used."""
    image_size_px: PositiveInt
    """Side of the network's input."""
    train_resize_px: PositiveInt
    """Side of the square that training crops are cut from."""


class TransferOptim(UpdateConfig):
    """The optimizer of a protocol, and which weights it trains at which share of the learning rate."""

    optimizer: str = "sgd"
    """AdamW (`adamw`), SGD with momentum (`sgd`), or a class as PACKAGE.MODULE:NAME, such as torch.optim:Adafactor."""


class Protocol(FrozenConfig):
    """How a model is fine-tuned, with a new head. The loss is that of the task: softmax for one label per image, sigmoid for
    several."""

    kind: Literal["finetune"] = "finetune"
    name: str
    """Name of the protocol, under which its scores are stored."""
    splits: Literal["1k", "full"] = "1k"
    """`1k`: choose settings on train800 and val200, and train once more on both. `full`: the same with train and val."""
    image_size_px: PositiveInt | None
    """Side of the network's input; None keeps the size of the model."""
    whole_patches: bool = False
    """Round the side up to whole patches: 512 becomes 518 for patches of 14."""
    small_pictures: SmallPictures | None = None
    """Resolution for tasks with small images; None uses one resolution for all tasks."""
    learning_rates: tuple[PositiveFloat, ...] = Field(min_length=1)
    """Learning rates to choose from on validation, each tried with each of `total_steps`."""
    total_steps: Steps
    """Numbers of steps to choose from on validation."""
    warmup_steps: NonNegativeInt
    """Steps of linear warmup."""
    larger: tuple[LargerTask, ...] = ()
    """Settings for tasks with many training examples, in ascending order of `at_least`."""
    fewer_than: PositiveInt | None = None
    """Number of training examples from which the protocol has no settings. None: any number."""
    schedule: Literal["cosine", "staircase"] = "cosine"
    """Half a cosine to zero, or division by ten at each of `milestones`."""
    milestones: tuple[float, ...] = digested_as("falls_at", (), field="milestones")
    """Fractions of the training after which the staircase schedule falls."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; None turns clipping off."""
    optim: TransferOptim = omitted_at_default(TransferOptim())
    """The optimizer, and what it trains: all weights, by SGD with momentum 0.9 and no weight decay."""
    average_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of averaged weights, which are then scored; None scores the weights of the last step."""
    global_batch_size: PositiveInt
    """Examples per optimizer step."""
    num_lanes: PositiveInt
    """Largest number of lanes. A task gets the largest number that divides the batch and has enough row groups."""
    augment: AugmentConfig
    """Crop, flip and resize. Its resolution is replaced by that of the protocol or the model."""
    vtab_exceptions: bool = False
    """Turn off flip or crop for the VTAB tasks where BiT does (arXiv:1912.11370, App. F)."""
    precision: Precision = "float32"
    """Precision of matrix products in training and scoring."""
    seed_statistic: Literal["mean", "median"] = "mean"
    """How the authors of the protocol combine the scores of several seeds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps, self.optim.head_first_steps)
        for task in self.larger:
            _check_warmup(task.warmup_steps, task.total_steps, self.optim.head_first_steps)
        if [t.at_least for t in self.larger] != sorted({t.at_least for t in self.larger}):
            raise ValueError(f"{self.name}: sort `larger` in the order of `at_least`, with each value once.")
        return self

    @property
    def digest(self) -> str:
        return digest_of(self)

    def settings(self, model: NetworkConfig, task: TaskFacts, seed: int) -> tuple[TrainRecipe, ...]:
        """One recipe per setting, for a network of this architecture. Raises ValueError for a task that is too large."""
        if self.fewer_than is not None and task.num_train >= self.fewer_than:
            raise ValueError(
                f"not supported: {self.name} has no settings for {self.fewer_than:,} training examples and more, and {task.name} has "
                f"{task.num_train:,}. Use protocol vit-paper-transfer instead."
            )
        own = {name: getattr(self, name) for name in ("learning_rates", "total_steps", "warmup_steps")}
        larger = next((t for t in reversed(self.larger) if task.num_train >= t.at_least), None)
        choice = larger or LargerTask(at_least=1, **own)
        augment, loss = self._augment(model, task), loss_for(single_label=task.single_label)
        if choice.mixup_alpha is not None:
            augment = replace(augment, mixup_alpha=choice.mixup_alpha)
        network = network_config(model.for_transfer(augment.image_size_px, head_bias_for(loss, task.num_classes)))
        data = InputConfig(
            global_batch_size=self.global_batch_size,
            num_lanes=max(n for n in range(1, task.max_lanes + 1) if self._allows_lanes(n)),
            shuffle_window=4,
            augment=augment,
        )
        return tuple(
            TrainRecipe(
                model=network,
                input=data,
                optim=OptimConfig(
                    **dict(self.optim),
                    peak_lr=lr,
                    warmup_steps=choice.warmup_steps,
                    schedule=self.schedule,
                    milestones=self.milestones if choice.milestones is None else choice.milestones,
                    clip_norm=self.clip_norm,
                ),
                loss=loss,
                total_steps=steps,
                seed=seed,
                precision=self.precision,
                average_decay=self.average_decay,
            )
            for steps in choice.total_steps
            for lr in choice.learning_rates
        )

    def _allows_lanes(self, lanes: int) -> bool:
        return lanes <= self.num_lanes and self.global_batch_size % lanes == 0

    def _augment(self, model: NetworkConfig, task: TaskFacts) -> AugmentConfig:
        small, given = self.small_pictures, self.augment
        if small and task.mean_area_px < small.area_px:
            changes = given.resized(small.image_size_px) | {"train_resize_px": small.train_resize_px}
        else:
            size = self.image_size_px or model.image_size_px
            if self.whole_patches and isinstance(model, ViTConfig):
                size = -(-size // model.patch_size_px) * model.patch_size_px
            changes = given.resized(size)
        excepted = vtab_task(task.name) if self.vtab_exceptions else None
        if excepted and not excepted.crop:
            changes |= {"train_crop": "none", "train_resize_px": None}
        if excepted and not excepted.flip:
            changes |= {"flip": False}
        return AugmentConfig.model_validate(given.model_dump() | changes)


def _check_warmup(warmup_steps: int, total_steps: Sequence[int], head_first_steps: int = 0) -> None:
    if head_first_steps + warmup_steps >= min(total_steps):
        first = f"optim.head_first_steps={head_first_steps} with " if head_first_steps else ""
        raise ValueError(
            f"{first}warmup_steps={warmup_steps} must be less than total_steps={min(total_steps)}; otherwise the learning rate "
            "does not reach its peak before the end. Set a smaller warmup_steps as well."
        )


# BiT's augmentation, which the paper follows: resize to a square of 448, random crop of 384, flip; evaluation resizes
# directly to the square. No antialias, like the resize of TensorFlow and JAX at that time.
_AS_BIT = AugmentConfig(image_size_px=384, train_crop="random", train_resize_px=448, flip=True, antialias=False)

# arXiv:2010.11929v2, Sec. B.1.1 and Table 4: one setting for all 19 tasks. The paper states no warmup; this one is from the
# authors' later code.
VIT_PAPER = Protocol(
    name="vit-paper",
    image_size_px=384,
    learning_rates=(0.01,),
    total_steps=(2500,),
    warmup_steps=200,
    global_batch_size=512,
    num_lanes=64,
    augment=_AS_BIT,
    vtab_exceptions=True,
    precision="bfloat16",
)

# Version 1 of the paper: two learning rates and two lengths for every task.
VIT_PAPER_V1 = replace(VIT_PAPER, name="vit-paper-v1", learning_rates=(0.01, 0.1), total_steps=(1000, 10_000))

# Table 4, for whole data sets: Pets and Flowers 500 steps, CIFAR 10,000, ImageNet 20,000. The paper chooses by data set.
# Here the size decides: the result is the same for these data sets, and others have settings too. The warmup is from the
# released code.
_TO_03, _TO_06 = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.06)
VIT_PAPER_TRANSFER = Protocol(
    name="vit-paper-transfer",
    splits="full",
    image_size_px=384,
    learning_rates=_TO_03,
    total_steps=(500,),
    warmup_steps=100,
    larger=(
        LargerTask(at_least=20_000, learning_rates=_TO_03, total_steps=(10_000,), warmup_steps=500),
        LargerTask(at_least=500_000, learning_rates=_TO_06, total_steps=(20_000,), warmup_steps=500),
    ),
    global_batch_size=512,
    num_lanes=64,
    augment=_AS_BIT,
    precision="bfloat16",
)
VIT_PAPER_TRANSFER_V1 = replace(
    VIT_PAPER_TRANSFER,
    name="vit-paper-transfer-v1",
    larger=(
        VIT_PAPER_TRANSFER.larger[0],
        LargerTask(at_least=500_000, learning_rates=_TO_06[:3], total_steps=(20_000,), warmup_steps=500),
    ),
)

# ImageNet in Table 2: 512 px, 518 for patches of 14, averaged weights (Sec. 4.1). The square before the crop keeps its ratio.
VIT_PAPER_IMAGENET_512 = replace(
    VIT_PAPER_TRANSFER, name="vit-paper-imagenet-512", image_size_px=512, whole_patches=True, average_decay=0.9999
)

# arXiv:1912.11370, Sec. 3.3, with the steps of the released bit_hyperrule.py, with which the published re-runs were made: division
# by ten after 200, 300 and 400 of 500 steps for small tasks, else after 30, 60 and 90 % of the steps. Larger tasks use MixUp with
# alpha 0.1. A task of VTAB-1k is a small one.
_LARGER_AS_BIT: dict[str, Any] = {
    "learning_rates": (0.003,),
    "warmup_steps": 500,
    "milestones": (0.3, 0.6, 0.9),
    "mixup_alpha": 0.1,
}
BIT_HYPERRULE = Protocol(
    name="bit-hyperrule",
    image_size_px=384,
    small_pictures=SmallPictures(area_px=96 * 96, image_size_px=128, train_resize_px=160),
    learning_rates=(0.003,),
    total_steps=(500,),
    warmup_steps=100,
    larger=(
        LargerTask(at_least=20_000, total_steps=(10_000,), **_LARGER_AS_BIT),
        LargerTask(at_least=500_000, total_steps=(20_000,), **_LARGER_AS_BIT),
    ),
    schedule="staircase",
    milestones=(0.4, 0.6, 0.8),
    clip_norm=None,
    global_batch_size=512,
    num_lanes=64,
    augment=_AS_BIT,
    vtab_exceptions=True,
    precision="bfloat16",
    seed_statistic="median",
)

# Like the lightweight sweep of the benchmark, but not known to be it: its result file names four settings and a resize to 224 px, and
# its README (google-research/task_adaptation, "Run adapt_and_eval.py") trains one of them on a TPU: batch 512, rate 0.01, 2,500 steps,
# division by ten after 30, 60 and 90 %. The other rate and length are ours.
FOUR_SETTINGS = Protocol(
    name="four-settings",
    image_size_px=224,
    learning_rates=(0.1, 0.01),
    total_steps=(2500, 10_000),
    warmup_steps=0,
    schedule="staircase",
    milestones=(0.3, 0.6, 0.9),
    clip_norm=None,
    global_batch_size=512,
    num_lanes=64,
    augment=AugmentConfig(image_size_px=224, train_crop="none", flip=False, antialias=False),
    precision="bfloat16",
    seed_statistic="median",
)


SMALL_IMAGES = Protocol(
    name="small-images",
    image_size_px=None,
    learning_rates=(0.03, 0.1, 0.3),
    total_steps=100,
    warmup_steps=10,
    global_batch_size=64,
    num_lanes=16,
    augment=AugmentConfig(train_crop="none", flip=False, antialias=True, image_size_px=32),
)
"""A 1k protocol for images of a few dozen pixels, such as the demo's: no crop or flip, the same for every task and control."""


def known_protocols() -> dict[str, Protocol | Probe]:
    """Every protocol by its name."""
    fine_tuning = (
        SMALL_IMAGES,
        VIT_PAPER,
        VIT_PAPER_V1,
        VIT_PAPER_TRANSFER,
        VIT_PAPER_TRANSFER_V1,
        VIT_PAPER_IMAGENET_512,
        BIT_HYPERRULE,
        FOUR_SETTINGS,
    )
    return {protocol.name: protocol for protocol in (*fine_tuning, *PROBES)}


def over_seeds(protocol: str, values: Sequence[float]) -> float:
    """The scores of several seeds as one number: mean or median, as the authors of the protocol report it."""
    return median(values) if seed_statistic(protocol) == "median" else fmean(values)


def seed_statistic(protocol: str) -> Literal["mean", "median"]:
    """How the protocol of this name combines seeds; the mean for an unknown name."""
    known = known_protocols()
    found = known.get(protocol) or known.get(protocol.rpartition("-")[0])  # a changed protocol ends in six hex digits
    return found.seed_statistic if isinstance(found, Protocol) else "mean"


def protocol_named(name: str) -> Protocol | Probe:
    """The protocol of this name. Raises ValueError listing the known protocols."""
    known = known_protocols()
    if name not in known:
        raise ValueError(f"There is no protocol {name!r}; available: {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name]
