"""The 19 tasks of VTAB as a table (arXiv:1910.04867; order and groups of ViT's Table 9)."""

import re
from collections.abc import Collection
from typing import Literal

from vitline.infra.config import FrozenConfig

Group = Literal["natural", "specialized", "structured"]


class VtabTask(FrozenConfig):
    """A task of the benchmark. Its corpus is `<root>/corpora/vtab-<name>`, with `-` instead of `_`."""

    name: str
    group: Group
    num_classes: int
    flip: bool = True
    """True if a mirrored image keeps its label."""
    crop: bool = True
    """True if a crop of the image keeps its label."""

    @property
    def corpus_name(self) -> str:
        return f"vtab-{self.name.replace('_', '-')}"


# arXiv:1912.11370, App. F.
_NO_FLIP = {"dsprites_orientation", "dsprites_location", "smallnorb_azimuth"}
_NO_CROP = {"clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location"}


def _tasks(group: Group, **num_classes: int) -> tuple[VtabTask, ...]:
    return tuple(
        VtabTask(name=name, group=group, num_classes=count, flip=name not in _NO_FLIP, crop=name not in _NO_CROP)
        for name, count in num_classes.items()
    )


VTAB_TASKS: tuple[VtabTask, ...] = (
    *_tasks("natural", caltech101=102, cifar100=100, dtd=47, flowers102=102, pets=37, sun397=397, svhn=10),
    *_tasks("specialized", patch_camelyon=2, eurosat=10, resisc45=45, diabetic_retinopathy=5),
    *_tasks(
        "structured",
        clevr_count=8,
        clevr_distance=6,
        dmlab=6,
        dsprites_location=16,
        dsprites_orientation=16,
        kitti_distance=4,
        smallnorb_azimuth=18,
        smallnorb_elevation=9,
    ),
)


# In the order of the tables of arXiv:1903.12261.
_CORRUPTIONS = (
    "gaussian-noise shot-noise impulse-noise defocus-blur glass-blur motion-blur zoom-blur snow frost fog brightness contrast "
    "elastic-transform pixelate jpeg-compression"
)
IMAGENET_C = tuple(f"imagenet-c-{corruption}" for corruption in _CORRUPTIONS.split())
"""The corpora of ImageNet-C, one for each corruption, with all five severities."""
ROBUSTNESS = ("imagenet-a", "imagenet-r", "imagenet-sketch", "objectnet", *IMAGENET_C)
"""Test sets of ImageNet's classes that were made to be hard, by name of the corpus; they have only a test split."""
TASK_GROUPS = {"vtab": tuple(task.corpus_name for task in VTAB_TASKS), "robustness": ROBUSTNESS}
"""Names that stand for several tasks."""


def vtab_task(corpus: str) -> VtabTask | None:
    """The VTAB task of a corpus named `vtab-<task>`; None for any other name, even if it equals the name of a task."""
    return next((task for task in VTAB_TASKS if corpus == task.corpus_name), None)


def benchmark_name(corpus: str) -> str:
    """The name of the VTAB task of a corpus; for any other corpus the name of the corpus."""
    task = vtab_task(corpus)
    return task.name if task else corpus


def metric_group(corpus: str) -> Literal["vtab", "tasks"]:
    """The prefix of a task's metrics: `vtab` for the 19 tasks, `tasks` for other corpora."""
    return "vtab" if vtab_task(corpus) else "tasks"


GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


class TaskSplits(FrozenConfig):
    """The splits of a task: choose settings on `train` and `val`, train once more on `joined`, score `test` once."""

    train: str
    val: str
    joined: str
    """`train` and `val` together as one split."""
    test: str = "test"


WHOLE = TaskSplits(train="train", val="val", joined="trainval")


def find_task_splits(names: Collection[str], where: str, wanted: Literal["1k", "full"] = "1k") -> TaskSplits:
    """Chooses the splits of a task among the splits `names` of the corpus at `where`.

    The `1k` protocols prefer VTAB's train800, val200 and train800val200, then the train<N>, val<M> and train<N>val<M> with
    the most training examples, then train, val and trainval. The `full` protocols use train, val and trainval only.
    Raises ValueError naming the splits found and expected.
    """
    if wanted == "full":
        if {WHOLE.train, WHOLE.val, WHOLE.joined, WHOLE.test} <= set(names):
            return WHOLE
        raise ValueError(
            f"{where} has splits {', '.join(sorted(names))}, but a protocol for whole data sets needs train, val, trainval "
            "and test. Choose a corpus with these splits: `vitline data ls` shows the splits of each."
        )
    pairs = [
        (int(train[1]), int(val[1]))
        for train in map(re.compile(r"train(\d+)").fullmatch, names)
        for val in map(re.compile(r"val(\d+)").fullmatch, names)
        if train and val
    ]
    counted = sorted(pairs, key=lambda pair: (pair != (800, 200), -pair[0], -pair[1]))
    candidates = [TaskSplits(train=f"train{n}", val=f"val{m}", joined=f"train{n}val{m}") for n, m in counted]
    candidates.append(WHOLE)
    for splits in candidates:
        if {splits.train, splits.val, splits.joined, splits.test} <= set(names):
            return splits
    raise ValueError(
        f"{where} has splits {', '.join(sorted(names))}, but a 1k protocol needs train800, val200, train800val200 and "
        "test, or the same with other numbers or without numbers (train, val, trainval, test). Choose a corpus with "
        "these splits: `vitline data ls` shows the splits of each."
    )
