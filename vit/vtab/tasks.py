"""The 19 tasks of VTAB as a table (arXiv:1910.04867; order and groups of ViT's Table 9)."""

from typing import Literal

from infra.config import FrozenConfig

Group = Literal["natural", "specialized", "structured"]


class VtabTask(FrozenConfig):
    """A task of the benchmark; its corpus is `<root>/corpora/vtab-<name>`, with `-` for `_`."""

    name: str
    group: Group
    num_classes: int

    @property
    def corpus_name(self) -> str:
        return f"vtab-{self.name.replace('_', '-')}"


def _tasks(group: Group, **num_classes: int) -> tuple[VtabTask, ...]:
    return tuple(VtabTask(name=name, group=group, num_classes=count) for name, count in num_classes.items())


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
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")
# What a corpus must offer to be scored by the 1k protocol: select on 800 -> 200, train on all 1,000, test once.
SELECT_SPLIT, VAL_SPLIT, FINAL_SPLIT, TEST_SPLIT = "train800", "val200", "train800val200", "test"
