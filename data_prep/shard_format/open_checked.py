"""Opens a shard: it is compared with what its manifest and shard list state before a row of it is read."""

from collections.abc import Callable

import pyarrow as pa
from pydantic import ValidationError

from vitline.data_prep.parquet_files import RowGroupFile
from vitline.data_prep.shard_format.identity import IDENTITY, ListedShard, ShardError, ShardIdentity, one_line
from vitline.infra.storage import Store


def open_shard(
    home: Store, listed: ListedShard, check: Callable[[RowGroupFile], object] = lambda file: None
) -> RowGroupFile:
    """Open a shard in its `segment_store`, with verification of page checksums. The only way to open one: it is compared with
    what its manifest and shard list state. Raises ShardError if it is missing, damaged or another shard.

    `check` looks at the file before its digest and size are compared, so that what it raises is reported first.
    """
    uri = home.uri_of(listed.key)
    try:
        handle = home.open(listed.key)
    except FileNotFoundError as error:
        raise ShardError(uri, "is missing") from error
    try:
        file = RowGroupFile(handle)
    except (OSError, pa.ArrowException) as error:
        handle.close()
        raise ShardError(uri, f"is truncated or not Parquet ({one_line(error)})") from error
    try:
        check_key(file, uri, listed.key)
        check(file)
        check_identity(file, uri, listed)
    except BaseException:
        file.close()
        raise
    return file


def check_shard(file: RowGroupFile, uri: str, schema: pa.Schema, rows_per_row_group: int, num_rows: int) -> None:
    """Compare the footer of a shard with the expected schema and row counts. Raises ShardError."""
    if not file.schema.equals(schema):
        found = ", ".join(f"{field.name}: {field.type}" for field in file.schema)
        raise ShardError(uri, f"has columns that differ from the manifest: {found}")
    if file.metadata.num_rows != num_rows:
        raise ShardError(uri, f"holds {file.metadata.num_rows:,} rows, but the manifest lists {num_rows:,}")
    num_groups = -(-num_rows // rows_per_row_group)
    if file.metadata.num_row_groups != num_groups:
        found = f"holds {file.metadata.num_row_groups:,} row groups, but {num_groups:,}"
        raise ShardError(uri, f"{found} of {rows_per_row_group} rows are expected")


def check_identity(file: RowGroupFile, uri: str, listed: ListedShard) -> None:
    """Compare what a shard states about itself with what manifest and shard list state. Raises ShardError."""
    found = _identity_of(file, uri)
    if found is None:
        raise ShardError(uri, "states no identity, but was written with one: another program rewrote it")
    if found.corpus != listed.corpus:
        raise ShardError(uri, f"is a shard of the corpus {found.corpus}, but the manifest is that of {listed.corpus}")
    if found.content_digest != listed.content_digest:
        digests = f"states the content digest {found.content_digest[:12]}, but the shard list says"
        raise ShardError(uri, f"{digests} {listed.content_digest[:12]}: it was swapped or rewritten")
    if found.data_bytes != file.data_bytes:
        sizes = f"holds {file.data_bytes:,} bytes of rows, but states that {found.data_bytes:,} were written"
        raise ShardError(uri, f"{sizes}: another program rewrote it")


def check_key(file: RowGroupFile, uri: str, key: str) -> None:
    if (found := _identity_of(file, uri)) and found.key != key:
        stated = f"states that it is {found.key} of the corpus {found.corpus}, with {file.metadata.num_rows:,} rows"
        raise ShardError(uri, f"{stated}, but the manifest lists {key} here: shards were swapped or copied")


def _identity_of(file: RowGroupFile, uri: str) -> ShardIdentity | None:
    """What a shard states about itself; None if another program rewrote it."""
    text = (file.metadata.metadata or {}).get(IDENTITY.encode())
    try:
        return None if text is None else ShardIdentity.model_validate_json(text)
    except ValidationError as error:
        raise ShardError(uri, f"states an identity that cannot be read ({one_line(error)})") from error
