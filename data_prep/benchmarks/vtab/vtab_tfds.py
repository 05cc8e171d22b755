"""A benchmark from a directory that TFDS prepared: the order is that of the directory, the images are its bytes.

An example id is the TFDS split and the position in it, such as train/00000799, because directories do not store keys.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitline.data_prep.archives.tfrecord import Feature
from vitline.data_prep.benchmarks import label_rules
from vitline.data_prep.benchmarks.official_splits import OfficialSplits, Views, order_key
from vitline.data_prep.config import CorpusRecipe, TfdsDirectory
from vitline.data_prep.labels.classes import ClassInfo, number_label
from vitline.data_prep.sources.raw import RawExample, SourcePart, WorkFolder
from vitline.data_prep.sources.tfds import LabelRefused, TfdsCorpus
from vitline.infra.storage import open_store

_KITTI_TYPES = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")
_RULES: Mapping[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "clevr_count": (lambda coords: label_rules.clevr_count(len(coords) // 3), ("objects/pixel_coords",)),
    "clevr_distance": (lambda coords: label_rules.clevr_distance(coords[2::3]), ("objects/pixel_coords",)),
    "dsprites_location": (lambda x: label_rules.dsprites_location(x[0]), ("label_x_position",)),
    "dsprites_orientation": (lambda angle: label_rules.dsprites_orientation(angle[0]), ("label_orientation",)),
    "kitti_distance": (
        lambda kinds, places: _kitti_distance(kinds, places[2::3]),
        ("objects/type", "objects/location"),
    ),
    "smallnorb_azimuth": (lambda azimuth: azimuth[0], ("label_azimuth",)),  # TFDS stores half of the original value
    "smallnorb_elevation": (lambda elevation: elevation[0], ("label_elevation",)),
}
"""For tasks whose class is not the feature `label`: the rule that computes the class from the values of features, and these."""


def _kitti_distance(kinds: Sequence[int], distances: Sequence[float]) -> int:
    return label_rules.kitti_distance((_KITTI_TYPES[kind], z) for kind, z in zip(kinds, distances, strict=True))


def is_tfds_directory(path: str) -> bool:
    """Whether a folder is the directory of one version, with its dataset_info.json."""
    return open_store(path).exists("dataset_info.json")


class OfficialTfdsCorpus(TfdsCorpus):
    """As `OfficialCorpus`, but read from a TFDS directory. Its parts are the shards of the directory."""

    def __init__(
        self,
        path: str,
        recipe: CorpusRecipe,
        task: str,
        official_splits: OfficialSplits,
        views: Views,
        num_classes: int,
    ) -> None:
        self._official_splits, self._task, self._num_classes = official_splits, task, num_classes
        # The split of an example follows from its position; the names given here only prevent drawing it by hash.
        splits: Any = dict.fromkeys(official_splits.sizes, "train")
        super().__init__(TfdsDirectory(path=path, splits=splits), recipe)
        self.views, self.benchmark_rows = views, official_splits.num_rows
        if self._task in _RULES:
            self.label_features = frozenset(_RULES[self._task][1])

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        there = self.num_examples()
        for split, expected in self._official_splits.sizes.items():
            if there.get(split, 0) != expected:
                raise ValueError(
                    f"{self.origin} has {there.get(split, 0):,} examples of {split}, but {self._task} expects "
                    f"{expected:,}. Give the directory of the version that the benchmark uses."
                )
        yield from super().parts(work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        for example in super().examples(part, work):
            if example.refused:
                yield example
                continue
            tfds_split, _, number = example.example_id.partition("/")
            split = self._official_splits.split_of(tfds_split, int(number))
            if split is not None:
                key = order_key(int(number), self._official_splits.sizes[tfds_split])
                yield replace(example, split=split, order_key=key)

    def labels_of(self, features: Mapping[str, Feature]) -> tuple[str, ...]:
        if self._task not in _RULES:
            return super().labels_of(features)
        rule, names = _RULES[self._task]
        try:
            label = rule(*(features[name].values if name in features else [] for name in names))
        except (ValueError, IndexError) as error:
            raise LabelRefused("no_label", f"{', '.join(names)}: {error}") from error
        return (number_label(label),)

    def declared_classes(self) -> tuple[str, ...]:
        return tuple(number_label(number) for number in range(self._num_classes))

    def class_info(self, source_id: str) -> ClassInfo:
        known = super().class_info(source_id)
        return known if self._task not in _RULES else ClassInfo(name=str(int(source_id)), source_id=source_id)

    def _check_features(self) -> None:
        if self._task not in _RULES:
            super()._check_features()
