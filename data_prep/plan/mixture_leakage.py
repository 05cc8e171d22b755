"""Leakage of a mixture: training images of its corpora that show an image of an evaluation set, also of another corpus of it.

The preparation of each corpus has compared it with the evaluation sets that were there by then. Compared here is what came later,
and the validation splits of the other corpora of the mixture, which preparations do not compare where they are drawn from train.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.find_corpus import FoundCorpus
from vitline.data_prep.plan.confirm import same_images
from vitline.data_prep.plan.leakage import EVALUATION_SCHEMA, candidates, prepared_sets, published_rows, rows_of_shard
from vitline.data_prep.plan.locate_images import ImageReader
from vitline.data_prep.shard_format import KnownShard, Manifest, known_shards
from vitline.infra.storage import Store


class MixtureLeak(NamedTuple):
    """How many training images of a corpus show an image of a split of an evaluation set."""

    corpus: str
    """NAME/VERSION."""
    evaluation: str
    """NAME/VERSION of the evaluation set."""
    split: str
    num_images: int


def find_mixture_leaks(
    corpora: Sequence[FoundCorpus],
    root: Store,
    *,
    split: str,
    val_split: str | None,
    compared: Mapping[str, Collection[tuple[str, str]]],
) -> list[MixtureLeak]:
    """The leaks that the preparations of the corpora could not find. `compared` are, by NAME/VERSION of a corpus, the evaluation
    sets (NAME/VERSION, split) that its preparation has compared it with.

    Reads the hashes of the training rows, and of images only those whose hashes are near. Raises ShardError for a bad shard.
    """
    sets = _evaluation_sets(corpora, root, val_split)
    leaks = list[MixtureLeak]()
    for corpus, manifest in corpora:
        title, rows = f"{manifest.name}/{manifest.version}", [EVALUATION_SCHEMA.empty_table()]
        for other, of, splits in sets:
            known = {done for name, done in compared.get(title, ()) if name == f"{of.name}/{of.version}"}
            if (
                of.name != manifest.name
            ):  # its own splits are compared by its own preparation, as far as the recipe asks for it
                rows += published_rows(other, of, [each for each in splits if each not in known])
        index = pa.concat_tables(rows)
        if len(index):
            leaks += _leaks(title, known_shards(corpus, manifest, split), index, manifest.decode_policy)
    return leaks


_Set = tuple[Store, Manifest, tuple[str, ...]]


def _evaluation_sets(corpora: Sequence[FoundCorpus], root: Store, val_split: str | None) -> list[_Set]:
    """The newest evaluation sets below the root, and the corpora of the mixture with the splits that are scored."""
    sets = {versions[-1][0].uri: versions[-1] for versions in prepared_sets(root, corpora).values()}
    for corpus, manifest in corpora:
        if val_split in manifest.splits:
            _, _, splits = sets.get(corpus.uri, (corpus, manifest, ()))
            sets[corpus.uri] = corpus, manifest, tuple(dict.fromkeys((*splits, str(val_split))))
    return [sets[uri] for uri in sorted(sets)]


def _leaks(title: str, shards: Sequence[KnownShard], index: pa.Table, policy: DecodePolicy) -> list[MixtureLeak]:
    names = list(zip(index["corpus"].to_pylist(), index["split"].to_pylist(), strict=True))
    found: Counter[tuple[str, str]] = Counter()
    images = ImageReader(policy)
    for shard in shards:
        pairs, _ = candidates(rows_of_shard(shard, ["phash", "phash_mirror"]), index)
        hits = {(pair.image, names[pair.other]) for pair in same_images(pairs, images)}
        found.update(name for _, name in hits)
    return [MixtureLeak(title, corpus, split, count) for (corpus, split), count in sorted(found.items())]
