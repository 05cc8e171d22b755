"""Stores and reads features of frozen networks: parts that are written once, and a manifest per complete split.

Parts are immutable and carry the digest of their content; the first writer wins. `feature_plan.py` defines the parts.
"""

import hashlib
import json
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import safetensors.torch
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitline.data_prep.shard_format import Manifest
from vitline.infra.records import StoredRecord
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store
from vitline.vit.checkpoints.tensor_file import raw_bytes
from vitline.vit.features.feature_plan import FeaturePart, FeatureSource

# Number of parts that are read ahead.
READ_AHEAD = 4


@dataclass(frozen=True)
class Features:
    """Features (n, D) of n images, float32, and their labels."""

    values: Float[Tensor, "n D"]
    labels: Int[Tensor, " m"]
    """The labels of all images, one image after another."""
    num_labels: Int[Tensor, " n"]
    """Number of labels of each image."""
    wall_s: float = 0.0
    """Seconds that computing the features took."""
    cpu_s: float = 0.0

    @property
    def classes(self) -> Int[Tensor, " n"]:
        """The label of each image, for images with exactly one label."""
        assert len(self.labels) == len(self.values), "every image must have exactly one label"
        return self.labels

    def right(self, predicted: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the predicted class of an image is one of its labels."""
        guess = predicted.cpu().repeat_interleave(self.num_labels)
        owner = torch.arange(len(self.values)).repeat_interleave(self.num_labels)
        right = torch.zeros(len(self.values), dtype=torch.bool)
        right[owner[guess == self.labels]] = True
        return right

    def hits(self, predicted: Int[Tensor, " n"]) -> int:
        """Number of images whose predicted class is one of their labels."""
        return int(self.right(predicted).sum())


def write_part(folder: Store, key: str, features: Features) -> None:
    """Stores a part, unless there is one under this key."""
    tensors = {
        "features": features.values.contiguous(),
        "labels": features.labels.int(),
        "num_labels": features.num_labels.int(),
    }
    about = {"sha256": _digest(tensors), "wall_s": f"{features.wall_s:.4f}", "cpu_s": f"{features.cpu_s:.4f}"}
    folder.create_if_absent(key, safetensors.torch.save(tensors, metadata=about))


def read_part(folder: Store, key: str, num_rows: int) -> Features:
    """Reads a part. Raises RuntimeError naming the file if it is missing, damaged or has another number of rows."""
    try:
        data = folder.read(key)
        (length,) = struct.unpack("<Q", data[:8])
        about, tensors = json.loads(data[8 : 8 + length])["__metadata__"], safetensors.torch.load(data)
        if _digest(tensors) != about["sha256"]:
            raise ValueError("its content does not match the digest that it was written with")
        if len(tensors["features"]) != num_rows:
            raise ValueError(f"it has {len(tensors['features'])} rows, expected {num_rows}")
    except (FileNotFoundError, ValueError, KeyError, struct.error, safetensors.SafetensorError) as error:
        raise RuntimeError(
            f"{folder.uri_of(key)} cannot be read as a part of these features: {error}. Delete the folder {folder.uri}; "
            "the next evaluation computes the features again."
        ) from error
    labels, num_labels = tensors["labels"].long(), tensors["num_labels"].long()
    return Features(tensors["features"], labels, num_labels, float(about["wall_s"]), float(about["cpu_s"]))


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in ("features", "labels", "num_labels"):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(raw_bytes(tensors[name]))
    return digest.hexdigest()


class SplitManifest(StoredRecord):
    """`<split>.json` of a folder: it exists once the features of the split are complete."""

    schema_version: int = 1
    source: FeatureSource
    split: str
    num_rows: int
    parts: tuple[tuple[str, int], ...]
    """Key and rows of each part, in row order."""
    made_at: float


def missing_parts(folder: Store, parts: Sequence[FeaturePart]) -> list[FeaturePart]:
    """The parts that are not in the store."""
    written = set(folder.list())
    return [part for part in parts if part.key not in written]


def finish_split(folder: Store, manifest: Manifest, parts: Sequence[FeaturePart]) -> None:
    """Writes the manifest of a split. Raises RuntimeError if a part is missing, or unless the parts have each row once."""
    split, source = parts[0].split, parts[0].source
    num_rows = manifest.split(split).num_rows
    if [row for part in parts for row in (part.rows.start, part.rows.stop)] != _fence(parts, num_rows):
        raise RuntimeError(
            f"The parts of split {split!r} of {source.corpus} do not contain each of its {num_rows:,} rows once. "
            "Evaluate again."
        )
    if missing := missing_parts(folder, parts):
        raise RuntimeError(
            f"{folder.uri_of(missing[0].key)} and {len(missing) - 1} more parts are missing although they were computed: "
            "something deletes features during the evaluation. Evaluate again."
        )
    whole = SplitManifest(
        source=source,
        split=split,
        num_rows=num_rows,
        parts=tuple((part.key, len(part.rows)) for part in parts),
        made_at=time.time(),
    )
    whole.stored_first(folder, f"{split}.json")


def _fence(parts: Sequence[FeaturePart], num_rows: int) -> list[int]:
    """The starts and stops that these parts would have if they covered row 0 to `num_rows` without a gap."""
    inner = [part.rows.stop for part in parts[:-1]]
    return [0, *(stop for stop in inner for _ in range(2)), num_rows]


class FeatureReader:
    """Reads the complete features of one or several splits, part by part.

    Raises RuntimeError if the features of a split are not complete. Iteration raises like `read_part`.
    """

    def __init__(self, root: Store, source: FeatureSource, splits: Sequence[str]) -> None:
        self._folder = root.child(source.folder)
        self.parts: list[tuple[str, int]] = []
        for split in splits:
            found = SplitManifest.load_or_none(self._folder, f"{split}.json")
            if found is None:
                raise RuntimeError(
                    f"{self._folder.uri_of(f'{split}.json')} is missing: the features of split {split!r} are not complete. "
                    "Evaluate again; stored parts are not computed again."
                )
            self.parts += found.parts
        self.num_rows = sum(rows for _, rows in self.parts)
        self.cost_s: dict[str, tuple[float, float]] = {}
        """Seconds and CPU seconds that computing each part took, for the parts read so far."""

    def __iter__(self) -> Iterator[Features]:
        """Yields the parts in row order, and reads the next ones ahead."""
        waiting: deque[Future[Features]] = deque()
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            try:
                for ahead, (key, _) in enumerate(self.parts):
                    upcoming = self.parts[ahead + len(waiting) : ahead + READ_AHEAD + 1]
                    waiting.extend(pool.submit(read_part, self._folder, *part) for part in upcoming)
                    part = waiting.popleft().result()
                    note_progress()
                    self.cost_s[key] = part.wall_s, part.cpu_s
                    yield part
            finally:
                for future in waiting:
                    future.cancel()

    def whole(self) -> Features:
        """All rows as one."""
        return _joined(list(self))

    def rows(self, wanted: Int[Tensor, " k"]) -> Float[Tensor, "k D"]:
        """The features of the wanted rows, in that order. All parts are read, but only these rows are kept."""
        order = wanted.argsort()
        ascending, kept, first = wanted[order], [], 0
        for part in self:
            stop = first + len(part.values)
            here = ascending[(ascending >= first) & (ascending < stop)]
            kept.append(part.values[here - first])
            first = stop
        return torch.cat(kept)[order.argsort()]

    def labels(self) -> Int[Tensor, " n"]:
        """The label of every row, for images with exactly one label."""
        return torch.cat([part.classes for part in self])


def _joined(parts: Sequence[Features]) -> Features:
    def cat(take: Callable[[Features], Tensor]) -> Tensor:
        return torch.cat([take(part) for part in parts])

    return Features(cat(lambda p: p.values), cat(lambda p: p.labels), cat(lambda p: p.num_labels))
