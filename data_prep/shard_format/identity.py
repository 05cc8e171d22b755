"""Which shard is which: what the manifest and the shard list (`shards.parquet`) state about each, and what each states itself."""

import json
from dataclasses import dataclass

import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from vitline.data_prep.parquet_files import read_table
from vitline.data_prep.shard_format.manifest import SHARDS_KEY, Manifest, segment_keys, segment_store
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store

IDENTITY = "vitline"
"""Name of the entry in the Parquet metadata of a shard."""


class ShardError(RuntimeError):
    """A shard is missing, damaged or differs from the manifest."""

    def __init__(self, uri: str, found: str) -> None:
        super().__init__(
            f"{uri} {found}. `vitline data verify` lists every bad shard of the corpus. Restore them from a copy; or delete "
            "them and manifest.json, then run `vitline data prepare` again, which writes only the missing shards."
        )
        self.uri, self.found = uri, found

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.uri, self.found)


class ShardIdentity(FrozenConfig):
    """What a shard states about itself in its own Parquet metadata, as JSON: which shard it is, and which rows it holds."""

    model_config = ConfigDict(extra="ignore")  # later versions may add fields

    corpus: str
    """Name of the corpus."""
    key: str
    """Split, segment and number of the shard: its key within the corpus."""
    content_digest: str
    data_bytes: NonNegativeInt
    """Bytes before the footer. It is wrong after a program has rewritten the rows and copied the metadata."""

    def as_metadata(self) -> dict[str, str]:
        """Key-value metadata for `ParquetWriter.add_key_value_metadata`."""
        return {IDENTITY: json.dumps(self.model_dump(mode="json"), sort_keys=True)}


@dataclass(frozen=True, slots=True)  # a large corpus lists 100,000 of them
class ListedShard:
    """What the manifest and the shard list state about a shard."""

    corpus: str
    """Name of the corpus."""
    key: str
    """Key of the shard in `segment_store`."""
    content_digest: str
    num_bytes: int


def listed_shards(corpus: Store, manifest: Manifest, split: str) -> dict[str, ListedShard]:
    """Every shard in use of a split, by key, from the shard list of the corpus (one object, read whole).

    Raises ShardError if the list is missing, damaged, or differs from the digest of the split in the manifest.
    """
    uri, info = corpus.uri_of(SHARDS_KEY), manifest.split(split)
    try:
        table = read_table(corpus, SHARDS_KEY, ["key", "content_digest", "num_bytes"])
    except FileNotFoundError as error:
        raise ShardError(uri, "is missing") from error
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ShardError(uri, f"cannot be read as the shard list ({one_line(error)})") from error
    lines = {key: (digest, size) for key, digest, size in zip(*(column.to_pylist() for column in table), strict=True)}
    keys = info.keys_in_use()
    if any(key not in lines for _, key in keys):
        raise ShardError(uri, f"does not list every shard of split {split!r}, which the manifest names")
    if info.digest_over(manifest.class_map_digest, {key: lines[key][0] for _, key in keys}) != info.digest:
        raise ShardError(uri, f"lists shards of split {split!r} whose digest differs from that in the manifest")
    return {key: ListedShard(manifest.name, key, *lines[key]) for _, key in keys}


class KnownShard(FrozenConfig):
    """A shard of a finished corpus, for tasks in other processes: where it is and what it must be."""

    home: str
    """URI of the store that holds it (`segment_store`)."""
    split: str
    listed: ListedShard
    num_rows: PositiveInt
    """Rows that belong to the split: the first rows of the shard."""


def known_shards(corpus: Store, manifest: Manifest, split: str) -> list[KnownShard]:
    """Every shard in use of a split, in order. Raises as `listed_shards`."""
    info, listed, shards = manifest.split(split), listed_shards(corpus, manifest, split), list[KnownShard]()
    for segment in info.segments:
        home, left = segment_store(corpus, segment).uri, segment.num_rows
        for number, key in enumerate(segment_keys(segment)[: info.shards_in_use(segment)]):
            num_rows = min(left, info.shard_rows(segment, number))
            shards.append(KnownShard(home=home, split=split, listed=listed[key], num_rows=num_rows))
            left -= num_rows
    return shards


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
