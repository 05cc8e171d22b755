"""Reads annotations of a data set (small text files, alone, in an archive or in a folder), and keeps labels made from them."""

from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa

from vitline.data_prep.archives.archives import archive_kind, read_members
from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import Store

_MAX_TEXT_BYTES = 64 << 20
_LABELS = "labels.parquet"


def annotation_texts(store: Store, key: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Path and text of the files whose path is `wanted`, in an archive or a folder (`key` ends with /); for any other file, the
    file itself. Raises ValueError if one is damaged, too large or not UTF-8."""
    for path, name, data in _files(store, key, wanted):
        if len(data) > _MAX_TEXT_BYTES:
            raise ValueError(
                f"{name} has more than {_MAX_TEXT_BYTES:,} bytes, too many for annotations. Download it again."
            )
        try:
            yield path, data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text: {error}. Download it again.") from error


def _files(store: Store, key: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str, bytes]]:
    uri = store.uri_of(key.rstrip("/"))
    if archive_kind(key):
        for member, data in read_members(store, key, _MAX_TEXT_BYTES, wanted=lambda member: wanted(member.path)):
            if member.refused and (member.kind == "damage" or wanted(member.path)):
                raise ValueError(f"{uri}!{member.path}: {member.refused[1]}. Download it again.")
            if data is not None:
                yield member.path, f"{uri}!{member.path}", data
    elif key.endswith("/"):
        for found in store.scan(key):
            if wanted(found.key):
                yield found.key, store.uri_of(found.key), store.read(found.key, 0, _MAX_TEXT_BYTES + 1)
    else:
        yield key, uri, store.read(key, 0, _MAX_TEXT_BYTES + 1)


def keep_labels(work: WorkFolder, labels: Mapping[str, Mapping[str, int]]) -> None:
    """Save labels by split and key, so that workers need not read all annotations for a few images."""
    rows = [(split, key, label) for split, of_split in labels.items() for key, label in of_split.items()]
    splits, keys, classes = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {
        "split": pa.array(splits, pa.string()),
        "key": pa.array(keys, pa.string()),
        "label": pa.array(classes, pa.int16()),
    }
    write_table(work.store, _LABELS, pa.table(columns))


def kept_labels(work: WorkFolder) -> dict[str, tuple[str, int]]:
    """Split and label by key, as saved by `keep_labels`."""
    table = read_table(work.store, _LABELS)
    splits, keys, labels = (table[name].to_pylist() for name in ("split", "key", "label"))
    return dict(zip(keys, zip(splits, labels, strict=True), strict=True))
