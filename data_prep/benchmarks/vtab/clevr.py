"""CLEVR: rendered scenes of 3 to 10 objects; the class is their number or the distance of the nearest one."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitline.data_prep.archives.archives import member_pieces
from vitline.data_prep.archives.json_array import json_items
from vitline.data_prep.benchmarks.image_files import image_paths
from vitline.data_prep.benchmarks.label_rules import clevr_count, clevr_distance
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.sources.folder_layout import refusal_by_name

_SPLITS = {"train": "train", "val": "validation"}
"""TFDS names of CLEVR's splits. Its test split has no scenes."""
_IMAGE = re.compile(r"(?:^|/)images/(train|val)/([^/]+)\Z")
_SCENES = re.compile(r"(?:^|/)scenes/CLEVR_(train|val)_scenes\.json\Z")
_READ_BYTES = 4 << 20


class Clevr(LabelledArchive):
    """The scene files have half a gigabyte; listing reads them once, one scene at a time."""

    official = official_files("clevr")

    def class_names(self) -> Sequence[str]:
        if self.task == "clevr_count":
            return [f"{number} objects" for number in range(3, 11)]
        ends = ("8", "8.5", "9", "9.5", "10")
        beyond = [f"nearest object beyond {a} and up to {b}" for a, b in itertools.pairwise(ends)]
        return [f"nearest object up to {ends[0]}", *beyond, f"nearest object beyond {ends[-1]}"]

    def key_of(self, path: str) -> str | None:
        image = _image(path)
        return image and image[1]

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        images: dict[str, list[str]] = {split: [] for split in _SPLITS.values()}
        scenes: dict[str, str] = {}
        for path in image_paths(self.store, self.archive):
            if image := _image(path):
                images[image[0]].append(image[1])
            elif found := _SCENES.search(path):
                scenes[_SPLITS[found[1]]] = path
        if missing := [name for name, split in _SPLITS.items() if split not in scenes]:
            raise self.official.damaged(self._uri, f"scenes/CLEVR_{missing[0]}_scenes.json is missing")
        return {split: self._labels_of(sorted(names), scenes[split]) for split, names in images.items()}

    def _labels_of(self, names: list[str], path: str) -> dict[str, int]:
        """The class of every image of a split, from the scenes in the file `path`."""
        try:
            scenes = [
                self._scene(scene, number) for number, scene in enumerate(json_items(self._pieces(path), "scenes"))
            ]
            return _joined(names, scenes)
        except ValueError as error:
            raise self.official.damaged(f"{self._uri}, {path}", error) from error

    def _scene(self, scene: Any, number: int) -> tuple[Any, int]:
        """Image name, if the scene has one, and class."""
        try:
            objects = scene["objects"]
            if self.task == "clevr_count":
                return scene.get("image_filename"), clevr_count(len(objects))
            depths = [float(it["pixel_coords"][2]) for it in objects]
            if not all(math.isfinite(depth) for depth in depths):  # min ignores NaN
                raise ValueError(f"depths {depths} are not finite")
            return scene.get("image_filename"), clevr_distance(depths)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"scene {number:,} is not valid ({error})") from error

    def _pieces(self, path: str) -> Iterator[bytes]:
        if not self.archive.endswith("/"):
            yield from member_pieces(self.store, self.archive, path)
            return
        with self.store.open(path) as file:
            while piece := file.read(_READ_BYTES):
                yield piece

    @property
    def _uri(self) -> str:
        return self.store.uri_of(self.archive.rstrip("/"))


def _image(path: str) -> tuple[str, str] | None:
    """TFDS split and key of an image; None for any other file."""
    found = _IMAGE.search(path)
    return None if found is None or refusal_by_name(path) else (_SPLITS[found[1]], found[2])


def _joined(names: list[str], scenes: list[tuple[Any, int]]) -> dict[str, int]:
    """Classes by image: by the names in the scenes or, as in TFDS, in the same order if the scenes have no names."""
    if all(isinstance(name, str) for name, _ in scenes):
        labels = dict(scenes)
        if len(labels) < len(scenes):
            raise ValueError(f"{len(scenes) - len(labels):,} images have more than one scene")
        if lacking := [name for name in names if name not in labels]:
            raise ValueError(f"{len(lacking):,} images have no scene, for example {lacking[0]}")
        return {name: labels[name] for name in names}
    if len(names) != len(scenes):
        raise ValueError(f"{len(scenes):,} scenes without image names, but {len(names):,} images")
    return {name: label for name, (_, label) in zip(names, scenes, strict=True)}
