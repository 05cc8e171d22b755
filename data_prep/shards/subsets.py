"""Subsets of a corpus: a manifest of its own over the same shards, without copying."""

from datetime import UTC, datetime

import pyarrow as pa

from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.records import UNCOUNTED
from vitline.data_prep.shard_format import (
    CLASSES_KEY,
    MANIFEST_KEY,
    SHARDS_KEY,
    Counts,
    Manifest,
    SplitInfo,
    ViewOrigin,
    first_rows,
    listed_shards,
    load_manifest,
)
from vitline.data_prep.shards.content_digest import corpus_digest
from vitline.infra.config import digest_of
from vitline.infra.storage import Store, open_store


def take(corpus: Store, num_rows: int, split: str = "train") -> Manifest:
    """The first rows of a split, as a corpus of the same name. Subsets are nested, because rows are in random order. Rows that
    were added later come after the first ones and are in random order among themselves.

    The other splits stay whole; splits that join this one, such as trainval for train, are not in the subset. The version
    follows from the digest of the corpus and the number, so a second request finds the subset. Raises ValueError if the split
    does not exist, does not have more rows than that, or joins other splits, and ShardError if the shard list is damaged.
    """
    manifest = load_manifest(corpus)
    info = manifest.split(split)
    if joined := [s.split for s in info.segments if s.split != split]:
        members = " and ".join(dict.fromkeys(joined))
        raise ValueError(
            f"take: {split} of {manifest.name}/{manifest.version} joins {members}, one after another, so its first rows are "
            f"not a random part of it. Take a subset of {members.replace(' and ', ' or ')} instead."
        )
    if not 0 < num_rows < info.num_rows:
        raise ValueError(
            f"take {num_rows:,}: {split} of {manifest.name}/{manifest.version} has {info.num_rows:,} rows. Ask for at least 1 "
            "and for fewer than that; the whole corpus needs no subset."
        )
    origin: ViewOrigin = {"version": manifest.version, "digest": manifest.digest, "split": split, "take": num_rows}
    view, found = _place_of_view(corpus, origin)
    if found:
        return found
    digests = _content_digests(corpus, manifest)
    splits = {}
    for name, whole in manifest.splits.items():
        if name == split:
            splits[name] = _shown(_first_rows(whole, num_rows), manifest, digests)
        elif all(
            segment.split != split for segment in whole.segments
        ):  # splits that join this one would have other rows
            splits[name] = _shown(whole, manifest, digests)
    rows = sum(part.num_rows for name, part in splits.items() if all(s.split == name for s in part.segments))
    counts = manifest.counts
    in_proportion = round(counts.num_bytes * rows / counts.num_accepted)
    origin["without"] = sorted(manifest.splits.keys() - splits.keys())
    taken = manifest.model_copy(
        update={
            "version": view.uri.rpartition("/")[2],
            "digest": corpus_digest(manifest.class_map_digest, splits, digests),
            "splits": splits,
            "counts": _shown_counts(counts, rows, in_proportion),
            "provenance": {**manifest.provenance, "view_of": origin, "created_at": utc_now()},
        }
    )
    keys = {key for part in splits.values() for _, key in part.keys_in_use()}
    listed = read_table(corpus, SHARDS_KEY)
    lines = [{**row, "version": row["version"] or manifest.version} for row in listed.to_pylist() if row["key"] in keys]
    write_table(view, SHARDS_KEY, pa.Table.from_pylist(lines, schema=listed.schema))
    view.write(CLASSES_KEY, corpus.read(CLASSES_KEY))
    view.write_json(MANIFEST_KEY, taken.model_dump(mode="json"))
    return taken


def _content_digests(corpus: Store, manifest: Manifest) -> dict[str, str]:
    listed = [listed_shards(corpus, manifest, name) for name in manifest.splits]
    return {key: shard.content_digest for shards in listed for key, shard in shards.items()}


def _place_of_view(corpus: Store, origin: ViewOrigin) -> tuple[Store, Manifest | None]:
    """Store of a subset, and its manifest if it exists. The version follows from the digest of the parent alone. Another
    version of the parent with another decode policy may have the same digest; its subsets get a version of their own."""
    identity = {"of": origin["digest"], "split": origin["split"], "take": origin["take"]}
    for version in (digest_of(identity), digest_of({**identity, "version": origin["version"]})):
        view = open_store(f"{corpus.uri.rpartition('/')[0]}/{version[:12]}")
        if not view.exists(MANIFEST_KEY):
            return view, None
        found = load_manifest(view)
        if found.view_of is not None and {**found.view_of, **origin} == found.view_of:
            return view, found
    raise RuntimeError(
        f"{view.uri} already holds a different corpus, not this subset of {origin['version']}. "
        "Delete it, or request a different number of rows."
    )


def _shown_counts(counts: Counts, rows: int, num_bytes: int) -> Counts:
    """Counts of a subset: its rows. Refused examples are reported for the parent only, but losses of unknown size for both."""
    lost = counts.refused.get(UNCOUNTED, 0)
    return Counts(
        num_found=rows + lost,
        num_accepted=rows,
        num_refused=lost,
        num_bytes=num_bytes,
        refused={UNCOUNTED: lost} if lost else {},
    )


def utc_now() -> str:
    """To the microsecond: versions of a corpus that are published within a second are told apart by it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _first_rows(info: SplitInfo, num_rows: int) -> SplitInfo:
    """The split limited to its first rows."""
    return info.model_copy(update={"num_rows": num_rows, "segments": first_rows(info.segments, num_rows)})


def _shown(info: SplitInfo, owner: Manifest, digests: dict[str, str]) -> SplitInfo:
    """The split as another version lists it: with the version that holds its shards, and its own digest."""
    segments = tuple(s.model_copy(update={"version": s.version or owner.version}) for s in info.segments)
    placed = info.model_copy(update={"segments": segments})
    return placed.model_copy(update={"digest": placed.digest_over(owner.class_map_digest, digests)})
