"""Where the features of frozen networks are stored. Features are the input of the head. Imports no torch.

    <root>/features/<12 hex>/<split>/<segment>/000000000-000000512.safetensors   rows of a segment
                             <split>.json                                        written last; without it, no features

A folder belongs to a model digest (which covers weights and image contract), a corpus digest and a decode policy. Parts
follow the segments that splits consist of, so train800, train and trainval share all parts but the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vitline.data_prep.shard_format import Manifest
from vitline.infra.config import FrozenConfig, digest_of
from vitline.infra.keys import RESULT_VERSIONS

# Large enough that writing a part takes little time compared with computing it, small enough that a kill loses only
# seconds of GPU time.
PART_ROWS = 512


class FeatureSource(FrozenConfig):
    """The model and the corpus of features: digests for their identity, URIs for their location."""

    model: str
    model_digest: str
    corpus: str
    corpus_digest: str
    decode_digest: str
    """Digest of the corpus's decode policy, which is not part of the other two digests."""
    repetition: int = 0
    """More than 0 if the features are computed again although there are some."""

    @property
    def folder(self) -> str:
        """`features/<12 hex>` below the root. Equal features have equal folders, wherever model and corpus are stored."""
        identity = [self.model_digest, self.corpus_digest, self.decode_digest, RESULT_VERSIONS["evaluate"]]
        identity += [self.repetition] if self.repetition else []
        return f"features/{digest_of(identity)[:12]}"


@dataclass(frozen=True)
class FeaturePart:
    """Some rows of a split, and the key of their features in the folder of the source."""

    source: FeatureSource
    split: str
    rows: range
    key: str


def plan_parts(
    source: FeatureSource, manifest: Manifest, split: str, part_rows: int | None = None, suffix: str = "safetensors"
) -> list[FeaturePart]:
    """The parts of a split in row order. A part is whole row groups of one segment, about `part_rows` (PART_ROWS) rows."""
    info = manifest.split(split)
    step = -(-(part_rows or PART_ROWS) // info.rows_per_row_group) * info.rows_per_row_group
    parts, first_row = [], 0
    for segment in info.segments:
        place = "/".join(filter(None, (segment.version, segment.split, segment.name)))
        for start in range(0, segment.num_rows, step):
            stop = min(start + step, segment.num_rows)
            rows = range(first_row + start, first_row + stop)
            parts.append(FeaturePart(source, split, rows, f"{place}/{start:09d}-{stop:09d}.{suffix}"))
        first_row += segment.num_rows
    return parts


def work_chunks(parts: Sequence[FeaturePart], num_workers: int, most: int = 16) -> list[list[FeaturePart]]:
    """Groups parts into work chunks: consecutive parts of one split, which a worker computes without a pause.

    There are about 16 chunks per worker, so that all workers end at about the same time, or more if a chunk would have
    more than `most` parts.
    """
    size = max(1, min(most, len(parts) // (16 * num_workers)))
    chunks = []
    for _, group in groupby(parts, key=lambda part: (part.source, part.split)):
        of_split = list(group)
        chunks += [of_split[i : i + size] for i in range(0, len(of_split), size)]
    return chunks
