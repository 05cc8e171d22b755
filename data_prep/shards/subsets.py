"""Subsets of a corpus as views: a manifest of their own over the same shards, and no copied byte (DESIGN 3.1)."""

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from data_prep.records import UNCOUNTED, read_table, write_table
from data_prep.shard_format import (
    CLASSES_KEY,
    MANIFEST_KEY,
    SHARDS_KEY,
    Counts,
    Manifest,
    SplitInfo,
    first_rows,
    load_manifest,
    segment_keys,
)
from data_prep.shards.content_digest import corpus_digest, split_digest
from infra.config import digest_of
from infra.storage import Store, open_store


def check_take(name: str, num_rows: int | None, train_at_most: int) -> None:
    """Raises ValueError where a view is asked for (not None) that train cannot be larger than, before it is prepared."""
    if num_rows is not None and num_rows >= train_at_most:
        raise ValueError(
            f"take {num_rows:,}: train of {name} will have {train_at_most:,} rows at most. Ask for fewer; the whole corpus "
            "needs no view."
        )


def take(corpus: Store, num_rows: int, split: str = "train") -> Manifest:
    """The first rows of a split as a corpus of the same name: nested by construction, as rows stand in random order. What
    was added stands behind what was there, and is in random order by itself.

    The other splits stay whole; those that are joined with this one, as trainval with train, are not in the view. Its
    version follows from the digest of the corpus and the number, so a second request finds it. Raises ValueError where the
    split does not exist, has no more rows than that, or is joined of others.
    """
    manifest = load_manifest(corpus)
    info = manifest.split(split)
    if joined := [s.split for s in info.segments if s.split != split]:
        members = " and ".join(dict.fromkeys(joined))
        raise ValueError(
            f"take: {split} of {manifest.name}/{manifest.version} shows rows of {members}, which stand one after another: "
            f"its first rows are no random part of it. Cut {members.replace(' and ', ' or ')} instead."
        )
    if not 0 < num_rows < info.num_rows:
        raise ValueError(
            f"take {num_rows:,}: {split} of {manifest.name}/{manifest.version} has {info.num_rows:,} rows. Ask for fewer, "
            "and for one at least; the whole corpus needs no view."
        )
    view_of = {"version": manifest.version, "digest": manifest.digest, "split": split, "take": num_rows}
    view, found = _place_of_view(corpus, view_of)
    if found:
        return found
    listed = read_table(corpus, SHARDS_KEY)
    digests = dict(zip(listed["key"].to_pylist(), listed["content_digest"].to_pylist(), strict=True))
    splits = {}
    for name, whole in manifest.splits.items():
        if name == split:
            splits[name] = _shown(_first_rows(whole, num_rows), manifest, digests)
        elif all(segment.split != split for segment in whole.segments):  # what was joined with it has other rows now
            splits[name] = _shown(whole, manifest, digests)
    rows = sum(part.num_rows for name, part in splits.items() if all(s.split == name for s in part.segments))
    counts = manifest.counts
    in_proportion = round(counts.num_bytes * rows / counts.num_accepted)
    without = {"without": sorted(manifest.splits.keys() - splits.keys())}
    taken = manifest.model_copy(
        update={
            "version": view.uri.rpartition("/")[2],
            "digest": corpus_digest(manifest.class_map_digest, splits, digests),
            "splits": splits,
            "counts": _shown_counts(counts, rows, in_proportion),
            "provenance": {**manifest.provenance, "view_of": view_of | without, "created_at": utc_now()},
        }
    )
    keys = {key for part in splits.values() for s in part.segments for key in segment_keys(s)[: part.shards_in_use(s)]}
    lines = [{**row, "version": row["version"] or manifest.version} for row in listed.to_pylist() if row["key"] in keys]
    write_table(view, SHARDS_KEY, pa.Table.from_pylist(lines, schema=listed.schema))
    view.write(CLASSES_KEY, corpus.read(CLASSES_KEY))
    view.write_json(MANIFEST_KEY, taken.model_dump(mode="json"))
    return taken


def _place_of_view(corpus: Store, view_of: Mapping[str, Any]) -> tuple[Store, Manifest | None]:
    """Where a view stands, and its manifest if it does. Its version follows from the digest of its parent alone; another
    version of the corpus may have that digest too, with another decode policy, and its views then stand elsewhere."""
    identity = {"of": view_of["digest"], "split": view_of["split"], "take": view_of["take"]}
    for version in (digest_of(identity), digest_of({**identity, "version": view_of["version"]})):
        view = open_store(f"{corpus.uri.rpartition('/')[0]}/{version[:12]}")
        if not view.exists(MANIFEST_KEY):
            return view, None
        found = load_manifest(view)
        if view_of.items() <= found.provenance.get("view_of", {}).items():
            return view, found
    raise RuntimeError(
        f"{view.uri} holds another corpus than the view of {view_of['version']}. Delete it, or ask for another number."
    )


def _shown_counts(counts: Counts, rows: int, num_bytes: int) -> Counts:
    """Of a view: its rows. What was refused is told of the corpus that it is of; what that one may lack, of both."""
    lost = counts.refused.get(UNCOUNTED, 0)
    return Counts(
        num_found=rows + lost,
        num_accepted=rows,
        num_refused=lost,
        num_bytes=num_bytes,
        refused={UNCOUNTED: lost} if lost else {},
    )


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _first_rows(info: SplitInfo, num_rows: int) -> SplitInfo:
    """The split cut behind its first rows."""
    return info.model_copy(update={"num_rows": num_rows, "segments": first_rows(info.segments, num_rows)})


def _shown(info: SplitInfo, owner: Manifest, digests: dict[str, str]) -> SplitInfo:
    """The split as another version lists it: with the place of its shards, and a digest of its own."""
    segments = tuple(s.model_copy(update={"version": s.version or owner.version}) for s in info.segments)
    placed = info.model_copy(update={"segments": segments})
    return placed.model_copy(update={"digest": split_digest(placed, owner.class_map_digest, digests)})
