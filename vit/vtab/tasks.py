"""The 19 tasks of VTAB as a table (arXiv:1910.04867; order and groups of ViT's Table 9)."""

import re
from collections.abc import Collection
from typing import Literal

from infra.config import FrozenConfig

Group = Literal["natural", "specialized", "structured"]


class VtabTask(FrozenConfig):
    """A task of the benchmark; its corpus is `<root>/corpora/vtab-<name>`, with `-` for `_`."""

    name: str
    group: Group
    num_classes: int
    flip: bool = True
    """Whether a mirrored picture keeps its label."""
    crop: bool = True
    """Whether a part of the picture keeps its label."""

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


def vtab_task(corpus: str) -> VtabTask | None:
    """The one of the 19 that this corpus is; none for a corpus of another name, also for one named as a task is."""
    return next((task for task in VTAB_TASKS if corpus == task.corpus_name), None)


def benchmark_name(corpus: str) -> str:
    """Of the corpus of one of the 19, the task's own name; any other corpus is a task under its own name."""
    task = vtab_task(corpus)
    return task.name if task else corpus


def metric_group(corpus: str) -> Literal["vtab", "tasks"]:
    """Where the metrics of a corpus's task stand: the 19 apart from one's own."""
    return "vtab" if vtab_task(corpus) else "tasks"


GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


class TaskSplits(FrozenConfig):
    """The splits of the 1k protocol: choose on `train` -> `val`, train once more on `joined`, score `test` once."""

    train: str
    val: str
    joined: str
    """Both together, as one split."""
    test: str = "test"


WHOLE = TaskSplits(train="train", val="val", joined="trainval")


def find_task_splits(names: Collection[str], where: str, wanted: Literal["1k", "full"] = "1k") -> TaskSplits:
    """The splits of a task among those of the corpus at `where`.

    Of the 1k protocol VTAB's train800, val200 and train800val200 come first; then train<N>, val<M> and train<N>val<M> with
    the most training examples; then train, val and trainval, which are the only ones of the full protocol. Raises
    ValueError naming what there is and what is wanted.
    """
    if wanted == "full":
        if {WHOLE.train, WHOLE.val, WHOLE.joined, WHOLE.test} <= set(names):
            return WHOLE
        raise ValueError(
            f"{where} has splits {', '.join(sorted(names))}; a protocol for whole data sets wants train, val, trainval and "
            "test. Take a corpus prepared as a task: `vitline data ls` shows the splits of each."
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
        f"{where} has splits {', '.join(sorted(names))}; the 1k protocol wants train800, val200, train800val200 and "
        "test, or the like with other numbers or none (train, val, trainval, test). Take a corpus prepared as a task: "
        "`vitline data ls` shows the splits of each."
    )
