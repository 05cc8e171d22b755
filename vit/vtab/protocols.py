"""Named protocols of fine-tuning: each fixes resolution, resize, settings and how one of them is chosen (DESIGN 3.7).

A protocol turns (architecture, facts of the task, seed) into the settings to try, each a whole TrainRecipe. Of a task it
knows how many training examples and how large pictures it has, and for VTAB the two augmentations that BiT excepts some
tasks from; what is tried never depends on a task's name otherwise, as VTAB asks.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infra.config import FrozenConfig, digest_of, replace
from infra.names import did_you_mean
from vit.config import OptimConfig, TrainRecipe
from vit.input.config import AugmentConfig, InputConfig
from vit.models.config import NetworkConfig, ViTConfig, network_config
from vit.vtab.probes import PROBES, Probe
from vit.vtab.tasks import vtab_task

Steps = Annotated[
    tuple[PositiveInt, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int) else value),
]
"""One length, or several to choose from."""


class TaskFacts(FrozenConfig):
    """What a protocol may know of a task."""

    name: str
    """Name of its corpus."""
    num_train: int
    """Examples of the split that is trained on last."""
    max_lanes: int
    """Row groups of the smallest split that is trained on: no more lanes can read it."""
    mean_area_px: float
    """Mean area of its first pictures."""


class LargerTask(FrozenConfig):
    """Settings for tasks of many examples, in place of the protocol's own."""

    at_least: PositiveInt
    """Training examples from which on they hold."""
    learning_rates: tuple[PositiveFloat, ...]
    total_steps: Steps
    warmup_steps: NonNegativeInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps)
        return self


class SmallPictures(FrozenConfig):
    """Another resolution for pictures that are small themselves."""

    area_px: PositiveInt
    """Mean area below which it holds."""
    image_size_px: PositiveInt
    train_resize_px: PositiveInt


class Protocol(FrozenConfig):
    """How a model is fine-tuned: SGD with momentum 0.9 and no weight decay on a new head, all weights trained."""

    kind: Literal["finetune"] = "finetune"
    name: str
    splits: Literal["1k", "full"] = "1k"
    """Choose on train800 -> val200 and train once more on both, or on train -> val and both."""
    image_size_px: PositiveInt | None
    """Input side; none keeps the model's own."""
    whole_patches: bool = False
    """Raise the side to whole patches: 512 becomes 518 for patches of 14."""
    small_pictures: SmallPictures | None = None
    """Another resolution for small pictures; none has one for all."""
    learning_rates: tuple[PositiveFloat, ...] = Field(min_length=1)
    """Settings to choose from on validation, each with each length."""
    total_steps: Steps
    """Lengths to choose from."""
    warmup_steps: NonNegativeInt
    """Steps of linear warmup."""
    larger: tuple[LargerTask, ...] = ()
    """Settings for larger tasks, in the order of their size."""
    fewer_than: PositiveInt | None = None
    """Training examples from which on the protocol asks for what is not supported (MixUp)."""
    schedule: Literal["cosine", "staircase"] = "cosine"
    """Half a cosine to zero, or to a tenth at each of `falls_at`."""
    falls_at: tuple[float, ...] = ()
    """Fractions of the training, for a staircase."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm."""
    average_decay: float | None = Field(None, gt=0, lt=1)
    """Of averaged weights, which are scored; none scores the last."""
    global_batch_size: PositiveInt
    num_lanes: PositiveInt
    """At most; as many as divide the batch and the task has row groups for."""
    augment: AugmentConfig
    """Crop, flip and resize; its resolution is replaced by the protocol's or the model's."""
    vtab_exceptions: bool = False
    """No flip and no crop for the tasks of VTAB that BiT excepts (arXiv:1912.11370, App. F)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of matrix products."""
    seed_statistic: Literal["mean", "median"] = "mean"
    """How the authors sum up runs with several seeds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps)
        if [t.at_least for t in self.larger] != sorted({t.at_least for t in self.larger}):
            raise ValueError(f"{self.name}: `larger` must stand in the order of `at_least`, each size once.")
        return self

    @property
    def digest(self) -> str:
        return digest_of(self)

    def settings(self, model: NetworkConfig, task: TaskFacts, seed: int) -> tuple[TrainRecipe, ...]:
        """One recipe per setting, for a network of this architecture. Raises ValueError for a task that the protocol is
        not made for."""
        if self.fewer_than is not None and task.num_train >= self.fewer_than:
            raise ValueError(
                f"not supported: {self.name} mixes pictures (MixUp) from {self.fewer_than:,} training examples on, and "
                f"{task.name} has {task.num_train:,}. Take vit-paper-transfer."
            )
        augment = self._augment(model, task)
        network = network_config(model.for_transfer(augment.image_size_px))
        data = InputConfig(
            global_batch_size=self.global_batch_size,
            num_lanes=max(n for n in range(1, task.max_lanes + 1) if self._may_have(n)),
            shuffle_window=4,
            augment=augment,
        )
        own = {name: getattr(self, name) for name in LargerTask.model_fields if name != "at_least"}
        size = next((t for t in reversed(self.larger) if task.num_train >= t.at_least), None)
        choice: Any = size or LargerTask(at_least=1, **own)
        return tuple(
            TrainRecipe(
                model=network,
                input=data,
                optim=OptimConfig(
                    optimizer="sgd",
                    peak_lr=lr,
                    warmup_steps=choice.warmup_steps,
                    schedule=self.schedule,
                    falls_at=self.falls_at,
                    clip_norm=self.clip_norm,
                ),
                total_steps=steps,
                seed=seed,
                precision=self.precision,
                average_decay=self.average_decay,
            )
            for steps in choice.total_steps
            for lr in choice.learning_rates
        )

    def _may_have(self, lanes: int) -> bool:
        return lanes <= self.num_lanes and self.global_batch_size % lanes == 0

    def _augment(self, model: NetworkConfig, task: TaskFacts) -> AugmentConfig:
        small, given = self.small_pictures, self.augment
        if small and task.mean_area_px < small.area_px:
            changes: dict[str, Any] = {
                "image_size_px": small.image_size_px,
                "train_resize_px": small.train_resize_px,
            }
        else:
            size = self.image_size_px or model.image_size_px
            if self.whole_patches and isinstance(model, ViTConfig):
                size = -(-size // model.patch_size_px) * model.patch_size_px
            ratio = (given.train_resize_px or 0) / given.image_size_px
            changes = {"image_size_px": size, "train_resize_px": round(size * ratio) or None}
        excepted = vtab_task(task.name) if self.vtab_exceptions else None
        if excepted and not excepted.crop:
            changes |= {"train_crop": "none", "train_resize_px": None}
        if excepted and not excepted.flip:
            changes |= {"flip": False}
        return AugmentConfig.model_validate(given.model_dump() | changes)


def _check_warmup(warmup_steps: int, total_steps: Sequence[int]) -> None:
    if warmup_steps >= min(total_steps):
        raise ValueError(
            f"warmup_steps={warmup_steps} leaves nothing of total_steps={min(total_steps)}; the learning rate would never "
            "reach its peak: set a smaller warmup_steps with it."
        )


# BiT's, which the paper follows: resize to the square of 448, crop 384 at random, flip; in evaluation straight to the
# square; no antialias, as TensorFlow's and JAX's resize of the time.
_AS_BIT = AugmentConfig(image_size_px=384, train_crop="random", train_resize_px=448, flip=True, antialias=False)

# arXiv:2010.11929v2, Sec. B.1.1 and Table 4: one setting for all 19 tasks. The warmup is that of the authors' later code;
# the paper states none.
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
)

# Version 1 of the paper: two learning rates and two lengths for every task.
VIT_PAPER_V1 = replace(VIT_PAPER, name="vit-paper-v1", learning_rates=(0.01, 0.1), total_steps=(1000, 10_000))

# Table 4, for whole data sets: Pets and Flowers 500 steps, CIFAR 10,000, ImageNet 20,000. It goes by data set in the paper
# and by size here, which is the same for these and says what is done with others. The warmup is the released code's.
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
)
VIT_PAPER_TRANSFER_V1 = replace(
    VIT_PAPER_TRANSFER,
    name="vit-paper-transfer-v1",
    larger=(
        VIT_PAPER_TRANSFER.larger[0],
        LargerTask(at_least=500_000, learning_rates=_TO_06[:3], total_steps=(20_000,), warmup_steps=500),
    ),
)

# Table 2's ImageNet: 512 px, 518 for patches of 14, averaged weights (Sec. 4.1). Squares before the crop in the same ratio.
VIT_PAPER_IMAGENET_512 = replace(
    VIT_PAPER_TRANSFER, name="vit-paper-imagenet-512", image_size_px=512, whole_patches=True, average_decay=0.9999
)

# arXiv:1912.11370, Sec. 3.3, with the steps of the released bit_hyperrule.py for small tasks (warmup of 100, a tenth after
# 200, 300 and 400 of 500 steps), which made the published re-runs. Larger tasks mix pictures.
BIT_HYPERRULE = Protocol(
    name="bit-hyperrule",
    image_size_px=384,
    small_pictures=SmallPictures(area_px=96 * 96, image_size_px=128, train_resize_px=160),
    learning_rates=(0.003,),
    total_steps=(500,),
    warmup_steps=100,
    fewer_than=20_000,
    schedule="staircase",
    falls_at=(0.4, 0.6, 0.8),
    clip_norm=None,
    global_batch_size=512,
    num_lanes=64,
    augment=_AS_BIT,
    vtab_exceptions=True,
    seed_statistic="median",
)

# The benchmark's own light sweep (arXiv:1910.04867; google-research/task_adaptation): four settings for every task, straight
# to 224 px, no crop, no flip. Two rates and two lengths are confirmed, their values are as the paper is remembered.
VTAB_SWEEP = Protocol(
    name="vtab-sweep",
    image_size_px=224,
    learning_rates=(0.1, 0.01),
    total_steps=(2500, 10_000),
    warmup_steps=0,
    schedule="staircase",
    falls_at=(0.3, 0.6, 0.9),
    clip_norm=None,
    global_batch_size=512,
    num_lanes=64,
    augment=AugmentConfig(image_size_px=224, train_crop="none", flip=False, antialias=False),
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
"""The 1k protocol at the size of the demo's pictures: as VTAB, without crop or flip, the same for every task and control."""


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
        VTAB_SWEEP,
    )
    return {protocol.name: protocol for protocol in (*fine_tuning, *PROBES)}


def over_seeds(protocol: str, values: Sequence[float]) -> float:
    """Scores of several seeds as one number, as the authors of the protocol of this name report them: mean or median."""
    return median(values) if seed_statistic(protocol) == "median" else fmean(values)


def seed_statistic(protocol: str) -> Literal["mean", "median"]:
    """Which of the two it is for the protocol of this name; the mean for one that is not known any more."""
    known = known_protocols()
    found = known.get(protocol) or known.get(protocol.rpartition("-")[0])  # an overridden one has six more digits
    return found.seed_statistic if isinstance(found, Protocol) else "mean"


def protocol_named(name: str) -> Protocol | Probe:
    """Raises ValueError that lists the protocols there are."""
    known = known_protocols()
    if name not in known:
        raise ValueError(f"There is no protocol {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name]
