"""Reads directories written by TensorFlow Datasets, without TensorFlow.

Images are the files that TFDS stored, byte for byte. An example id is the TFDS split and the position in its order, such as
train/00000799. Shards are consecutive pieces of that order, so `train[:800]` are the ids below train/00000800, whatever the number of
shards. The keys from which TFDS computed the order are not stored.
"""

import contextlib
import functools
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from vitline.data_prep.archives.tfrecord import DamagedFile, Feature, frames, read_example
from vitline.data_prep.config import CorpusRecipe, TfdsDirectory
from vitline.data_prep.labels.classes import ClassInfo, number_label
from vitline.data_prep.labels.label_texts import numbered_class
from vitline.data_prep.sources.raw import (
    ImageSource,
    Locator,
    RawExample,
    SourcePart,
    Spill,
    SplitRule,
    WorkFolder,
    files_digest,
)
from vitline.infra.storage import Store, open_store

_INFO, _FEATURES = "dataset_info.json", "features.json"
_SMALLEST_RECORD_BYTES = {"tfrecord": 16, "array_record": 1}
_INTEGERS = re.compile(r"u?int\d+")


class _Split(BaseModel):
    name: str
    shard_lengths: tuple[NonNegativeInt, ...] = Field(alias="shardLengths")
    template: str = Field("{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", alias="filepathTemplate")


class _Info(BaseModel):
    name: str
    file_format: str = Field("tfrecord", alias="fileFormat")
    splits: tuple[_Split, ...]

    def shard_key(self, split: _Split, shard: int) -> str:
        """The name of a shard file, from the template of the split."""
        of = f"{len(split.shard_lengths):05d}"
        words = {
            "DATASET": self.name,
            "SPLIT": split.name,
            "FILEFORMAT": self.file_format,
            "SHARD_INDEX": f"{shard:05d}",
            "NUM_SHARDS": of,
            "SHARD_X_OF_Y": f"{shard:05d}-of-{of}",
        }
        return re.sub(r"\$?\{(\w+)\}", lambda word: words.get(word[1], word[0]), split.template)


class LabelRefused(ValueError):
    """A record without a usable label; the text is the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TfdsCorpus(ImageSource):
    """One version of a data set, on any store. Each part is a shard file."""

    def __init__(self, source: TfdsDirectory, recipe: CorpusRecipe) -> None:
        self.source, self._recipe, self.store = source, recipe, open_store(source.path)
        self.origin, self.single_label = self.store.uri, source.single_label
        self.label_features = frozenset({source.label_feature})
        """The features that `labels_of` needs."""

    def fingerprint(self) -> str:
        return files_digest(self.store.scan(), self._info.name)

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        info, taken = self._info, self._taken()
        self._check_features()
        if info.file_format not in _SMALLEST_RECORD_BYTES:
            raise ValueError(
                f"{self.origin} holds {info.file_format} files, which is not supported; tfrecord and array_record are supported. "
                "Prepare it again with file_format='array_record'."
            )
        if info.file_format == "array_record" and importlib.util.find_spec("array_record") is None:
            raise ValueError(
                f"{self.origin} holds array_record files; reading them needs the package array-record. Run: "
                "pip install array-record."
            )
        present: list[Any] = sorted({self.source.splits[split.name] for split in taken})
        for split in taken:
            first = 0
            for shard, num_examples in enumerate(split.shard_lengths):
                key = info.shard_key(split, shard)
                size = self._shard_size(key, num_examples)
                where = {"split": split.name, "first": first, "present": present}
                yield SourcePart(name=key, num_bytes=size, num_examples=num_examples, where=where)
                first += num_examples

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        rule = SplitRule(self._recipe, frozenset(part.where["present"]))  # type: ignore[arg-type]
        shard = _Shard(self, part, rule)
        if self._info.file_format == "tfrecord":
            yield from shard.tfrecord_examples()
        else:
            yield from shard.array_record_examples(work)

    def class_info(self, source_id: str) -> ClassInfo:
        return numbered_class(source_id, self._class_names)

    def labels_of(self, features: Mapping[str, Feature]) -> tuple[str, ...]:
        """The labels of a record. Raises LabelRefused."""
        label = features.get(self.source.label_feature, Feature("", []))
        if label.kind not in ("int64", "") or any(number < 0 for number in label.values) or not label.values:
            # TFDS writes -1 for an unknown label, as in the test split of a competition.
            detail = (
                f"{self.source.label_feature!r} is {label.values[:8]} of type {label.kind or 'nothing'}; "
                "expected non-negative int64 labels"
            )
            raise LabelRefused("no_label", detail)
        if self.source.single_label and len(label.values) > 1:
            raise LabelRefused(
                "damaged_archive", f"{len(label.values)} labels; set source.single_label to false to keep them all"
            )
        return tuple(dict.fromkeys(number_label(number) for number in label.values))

    def num_examples(self) -> dict[str, int]:
        """Number of examples of every TFDS split. Raises ValueError if the directory was not written by TFDS."""
        return {split.name: sum(split.shard_lengths) for split in self._info.splits}

    @functools.cached_property
    def _info(self) -> _Info:
        try:
            return _Info.model_validate(self.store.read_json(_INFO))
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.origin} has no {_INFO}. Give the folder of one version, such as oxford_flowers102/2.1.1."
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            field = "/".join(map(str, first["loc"]))
            raise ValueError(
                f"{self.store.uri_of(_INFO)}: {field}: {first['msg']}. Prepare the data set again with a newer TFDS."
            ) from error

    @functools.cached_property
    def _class_names(self) -> list[str]:
        key = f"{self.source.label_feature.replace('/', '-')}.labels.txt"
        try:
            lines = self.store.read(key).decode(errors="replace").split("\n")
        except FileNotFoundError:
            return []
        return [line.strip() for line in lines if line.strip()]  # as TFDS reads it

    def _taken(self) -> list[_Split]:
        taken = [split for split in self._info.splits if split.name in self.source.splits]
        if not taken:
            raise ValueError(
                f"{self.origin} has the splits {', '.join(split.name for split in self._info.splits)}, but none of "
                f"{', '.join(self.source.splits)}. Set `splits` to the splits to take, and what each becomes."
            )
        return taken

    def _shard_size(self, key: str, num_examples: int) -> int:
        try:
            size = self.store.size(key)
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.store.uri_of(key)} is missing, but {_INFO} lists it. Copy the whole folder."
            ) from error
        # Otherwise a wrong number of examples would become as many refusals.
        if num_examples * _SMALLEST_RECORD_BYTES[self._info.file_format] > size:
            raise ValueError(
                f"{self.store.uri_of(key)} has {size:,} bytes, too few for the {num_examples:,} examples that {_INFO} "
                "states. Copy the folder again."
            )
        return size

    def _check_features(self) -> None:
        """Raises ValueError if features.json says that image or label have an unsupported type."""
        try:
            top = self.store.read_json(_FEATURES)
        except FileNotFoundError:
            return  # TFDS before version 4: only the records show the types
        image, depth = self._found(top, self.source.image_feature)
        kind, dtype = _class_of(image), _dtype_of(image)
        if kind != "Image" or depth or dtype == "float32":
            what = f"{kind} of {dtype or 'bytes'}" + " in a sequence" * bool(depth)
            raise ValueError(
                f"{self.origin}: the feature {self.source.image_feature!r} is {what}, which is not supported; expected an "
                "Image of 8 or 16 bits. Set `image_feature` to another feature."
            )
        label, depth = self._found(top, self.source.label_feature)
        while _class_of(label) == "Sequence":
            label, depth = _inner(label), depth + 1
        kind, dtype, shape = _class_of(label), _dtype_of(label), _property(label, "shape") or {}
        depth += len(_of(shape, "dimensions") or ()) if isinstance(shape, dict) else len(shape)
        plain = kind == "Tensor" and _INTEGERS.fullmatch(dtype) and _property(label, "encoding") in (None, "", "none")
        if not (kind == "ClassLabel" or plain) or depth > 1 or (depth and self.single_label):
            what = f"{kind} of {dtype or 'int64'}" + " in a sequence" * depth
            raise ValueError(
                f"{self.origin}: the feature {self.source.label_feature!r} is {what}; expected a ClassLabel or an "
                "integer, or a sequence of these with single_label false. Set `label_feature` to another feature."
            )

    def _found(self, top: Any, path: str) -> tuple[Any, int]:
        """A feature by its path, such as objects/kind, and the number of sequences around it."""
        node, depth = top, 0
        for name in path.split("/"):
            while _class_of(node) == "Sequence":
                node, depth = _inner(node), depth + 1
            children = _of(_of(node, "featuresDict"), "features") or _of(node, "content")
            if not isinstance(children, dict) or name not in children:
                names = ", ".join(children) if isinstance(children, dict) else "nothing"
                raise ValueError(f"{self.origin} has no feature {path!r}; it has {names}. Choose one of these.")
            node = children[name]
        return node, depth


# Early files have {"type": "module.Class", "content": ...}, later ones {"pythonClassName": ..., "image": ...}.
def _of(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else None


def _class_of(node: Any) -> str:
    return str(_of(node, "pythonClassName") or _of(node, "type") or "nothing").rpartition(".")[2]


def _dtype_of(node: Any) -> str:
    return str(_property(node, "dtype") or "")


def _property(node: Any, name: str) -> Any:
    for content in node.values() if isinstance(node, dict) else ():
        if isinstance(content, str) and content.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(content)
        if isinstance(content, dict) and name in content:
            return content[name]
    return None


def _inner(sequence: Any) -> Any:
    return _property(sequence, "feature")


class _Shard:
    """The examples of one file. Examples are accepted or refused individually; unreachable ones are refused as well."""

    def __init__(self, corpus: TfdsCorpus, part: SourcePart, rule: SplitRule) -> None:
        self._store, self._part, self._rule, self._source = corpus.store, part, rule, corpus.source
        self._first, self._split = int(str(part.where["first"])), str(part.where["split"])
        self._named, self._labels_of = corpus.source.splits[self._split], corpus.labels_of
        self._wanted = corpus.label_features | {corpus.source.image_feature}

    def tfrecord_examples(self) -> Iterator[RawExample]:
        index, why = 0, f"{self._store.uri_of(self._part.name)} ends before this example, which {_INFO} lists"
        try:
            for frame in frames(self._store, self._part.name):
                if frame.damage:
                    yield self._refused(index, "damaged_archive", frame.damage)
                else:
                    yield self._example(index, frame.payload, frame.offset)
                index += 1
        except DamagedFile as error:
            why = str(error)
            if index >= self._part.num_examples:
                yield self._refused(index, "damaged_archive", why)
        for missing in range(index, self._part.num_examples):
            yield self._refused(missing, "damaged_archive", why)

    def array_record_examples(self, work: WorkFolder) -> Iterator[RawExample]:
        from array_record.python.array_record_module import ArrayRecordReader

        with _local_file(self._store, self._part.name) as path, Spill(work, self._part) as spill:
            # Without reading ahead, a damaged record does not affect others.
            reader = ArrayRecordReader(str(path), options="readahead_buffer_size:0,max_parallelism:0")
            held = reader.num_records()
            for index in range(max(held, self._part.num_examples)):
                if index >= held:
                    why = f"{self._store.uri_of(self._part.name)} holds {held:,} records, but {_INFO} lists more"
                    yield self._refused(index, "damaged_archive", why)
                    continue
                try:
                    payload = reader.read([index])[0]
                except (RuntimeError, ValueError) as error:
                    yield self._refused(index, "damaged_archive", str(error))
                    continue
                yield self._example(index, payload, None, spill)
            with contextlib.suppress(RuntimeError):  # raises the error of a damaged record again
                reader.close()

    def _example(self, index: int, payload: bytes, offset: int | None, spill: Spill | None = None) -> RawExample:
        """A record as an example. Its image is read at `offset` of the file, or from the spill."""
        if index >= self._part.num_examples:
            listed = f"{_INFO} states {self._part.num_examples:,} examples for {self._part.name}: the file is from another preparation"
            return self._refused(index, "damaged_archive", listed)
        try:
            features = read_example(payload, self._wanted)
        except ValueError as error:
            return self._refused(index, "damaged_archive", f"invalid tf.train.Example: {error}")
        image = features.get(self._source.image_feature, Feature("", []))
        if image.kind != "bytes" or len(image.values) != 1:
            found = f"{len(image.values)} values of type {image.kind or 'nothing'}"
            detail = f"{self._source.image_feature!r} has {found}; expected one of type bytes"
            return self._refused(index, "damaged_archive", detail)
        try:
            labels = self._labels_of(features)
        except LabelRefused as error:
            return self._refused(index, error.reason, str(error))
        data, start = payload[image.values[0]], (offset or 0) + image.values[0].start
        place = Locator(base=self._store.uri, key=self._part.name, offset=start, length=len(data))
        example_id = self._id(index)
        return RawExample(
            example_id=example_id,
            labels=labels,
            split=self._rule.assign_split(example_id, self._named),
            data=data,
            **(spill.keep(data) if spill else place),
        )

    def _id(self, index: int) -> str:
        if index >= self._part.num_examples:
            return f"{self._split}/{self._part.name}!{index:08d}"
        return f"{self._split}/{self._first + index:08d}"

    def _refused(self, index: int, reason: str, detail: str) -> RawExample:
        example_id = self._id(index)
        split = self._rule.assign_split(example_id, self._named)
        return RawExample(example_id, (), split, self._store.uri, self._part.name, refused=(reason, detail))


@contextlib.contextmanager
def _local_file(store: Store, key: str) -> Iterator[Path]:
    """The local file, or a temporary local copy: the package reads local files only."""
    scheme, _, folder = store.uri.partition("://")
    if scheme == "file":
        yield Path(folder, key)
        return
    with tempfile.NamedTemporaryFile(prefix="vitline-tfds-") as copy:
        with store.open(key) as file:
            shutil.copyfileobj(file, copy, 8 * 1024 * 1024)
        copy.flush()
        yield Path(copy.name)
