"""KITTI's object detection images; the class is the distance to the nearest car, van or truck ahead."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitline.data_prep.benchmarks.annotation_files import annotation_texts
from vitline.data_prep.benchmarks.image_files import image_paths
from vitline.data_prep.benchmarks.label_rules import kitti_distance
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.sources.folder_layout import refusal_by_name

_IMAGE = re.compile(r"(?:^|/)training/image_2/([0-9]{6})\.png\Z")
_LABEL = re.compile(r"(?:^|/)training/label_2/([0-9]{6})\.txt\Z")
_MAPPING = re.compile(r"(?:^|/)(train_rand|train_mapping)\.txt\Z")
_NUM_FIELDS, _KIND, _Z = 15, 0, 13
_DRAWN_PERCENT = 10


class Kitti(LabelledArchive):
    """KITTI. Images of one drive resemble each other, so TFDS draws whole drives for validation and test."""

    official = official_files("kitti")

    def class_names(self) -> Sequence[str]:
        return ["vehicle up to 8 m ahead", "vehicle beyond 8 m", "vehicle beyond 20 m", "no vehicle"]

    def key_of(self, path: str) -> str | None:
        number = _number(path)
        return number and f"{number}.png"

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        splits, distances = self._splits_of_images(), self._distances()
        labels: dict[str, dict[str, int]] = {"train": {}, "validation": {}, "test": {}}
        for path in image_paths(self.store, self.archive):
            number = _number(path)
            if number is None or int(number) >= len(splits):  # TFDS leaves these out as well
                continue
            if number not in distances:
                where = self._uri("data_object_label_2.zip")
                raise self.official.damaged(where, f"no training/label_2/{number}.txt for the image {number}.png")
            labels[splits[int(number)]][f"{number}.png"] = distances[number]
        return labels

    def _distances(self) -> dict[str, int]:
        """The class of each image by its six digits."""
        found = {}
        key = self.file("data_object_label_2.zip")
        for path, text in annotation_texts(self.store, key, lambda path: bool(_LABEL.search(path))):
            try:
                found[path[-len("000000.txt") : -len(".txt")]] = kitti_distance(_objects(text))
            except ValueError as error:
                where = f"{self._uri('data_object_label_2.zip')}, {path}"
                raise self.official.damaged(where, error) from error
        return found

    def _splits_of_images(self) -> list[str]:
        """The TFDS split of images 0, 1, ...: that of their drive."""
        key, texts = self.file("devkit_object.zip"), dict[str, str]()
        for path, text in annotation_texts(self.store, key, lambda path: bool(_MAPPING.search(path))):
            texts[path.rpartition("/")[2]] = text
        try:
            if missing := {"train_rand.txt", "train_mapping.txt"} - texts.keys():
                raise ValueError(f"mapping/{min(missing)} is missing")
            drives = drives_of_images(texts["train_rand.txt"], texts["train_mapping.txt"])
            splits = splits_of_drives(drives)
        except ValueError as error:
            raise self.official.damaged(self._uri("devkit_object.zip"), error) from error
        return [splits[drive] for drive in drives]

    def _uri(self, name: str) -> str:
        return self.store.uri_of(self.file(name).rstrip("/"))


def _number(path: str) -> str | None:
    """The six digits of an image; None for any other file."""
    found = _IMAGE.search(path)
    return None if found is None or refusal_by_name(path) else found[1]


def _objects(text: str) -> Iterator[tuple[str, float]]:
    """Type and `location[2]` of the objects in a label file."""
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split(" ")
        if len(fields) != _NUM_FIELDS:
            raise ValueError(f"line {number} has {len(fields)} fields; expected {_NUM_FIELDS}")
        z = float(fields[_Z])
        if not math.isfinite(z):
            raise ValueError(f"line {number} has distance {z}, which is not finite")
        yield fields[_KIND], z


def drives_of_images(rand: str, mapping: str) -> list[str]:
    """The drive of every image. `rand` (train_rand.txt) has for each image the number, from 1 on, of its line in `mapping`
    (train_mapping.txt), whose second word is the drive. Raises ValueError for any other content."""
    lines, drives = mapping.splitlines(), []
    for position, text in enumerate(rand.split(",")):
        words = lines[int(text) - 1].split(" ") if 1 <= int(text) <= len(lines) else []
        if len(words) < 2:
            raise ValueError(
                f"entry {position} of train_rand.txt is {text.strip()}, which is not a line of train_mapping.txt with a drive"
            )
        drives.append(words[1])
    return drives


def splits_of_drives(drives: Sequence[str]) -> dict[str, str]:
    """The TFDS split of every drive: a tenth of the drives each is drawn for test and, from the rest, for validation.

    The draws are those of numpy's legacy generator, whose stream numpy never changes (NEP 19). Raises ValueError if there are
    fewer than three drives.
    """
    names = sorted(set(drives))
    if len(names) < 3:
        raise ValueError(f"there are {len(names)} drives; at least three are expected")
    num_drawn, draw = max(1, _DRAWN_PERCENT * len(names) // 100), np.random.RandomState(123)
    test = {str(name) for name in draw.choice(names, num_drawn, replace=False)}
    rest = [name for name in names if name not in test]
    validation = {str(name) for name in draw.choice(rest, num_drawn, replace=False)}
    return {name: "test" if name in test else "validation" if name in validation else "train" for name in names}
