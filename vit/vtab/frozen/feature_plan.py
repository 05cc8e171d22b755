"""Which features of frozen networks are kept where: what the head reads, for every image of a split. Imports no torch.

    <root>/features/<12 hex>/<split>/<segment>/000000000-000000512.safetensors   rows of a segment
                             <split>.json                                        written last; without it, no features

A folder belongs to (model digest, corpus digest, decode policy); the model digest covers weights and image contract. Parts
follow the segments that splits are made of, so train800, train and trainval share all but their last part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from data_prep.shard_format import Manifest
from infra.config import FrozenConfig, digest_of
from infra.result_versions import RESULT_VERSIONS

# Large enough that writing a part is cheap beside computing it, small enough that a kill loses seconds of a GPU.
PART_ROWS = 512


class FeatureSource(FrozenConfig):
    """Whose features, of which pictures: digests say what, URIs where it lies."""

    model: str
    model_digest: str
    corpus: str
    corpus_digest: str
    decode_digest: str
    """Of the corpus's decode policy, which neither digest covers."""
    repetition: int = 0
    """Computed again in spite of features that are kept."""

    @property
    def folder(self) -> str:
        """`features/<12 hex>`, below the root; equal features have equal folders, wherever model and corpus lie."""
        identity = [self.model_digest, self.corpus_digest, self.decode_digest, RESULT_VERSIONS["evaluate"]]
        identity += [self.repetition] if self.repetition else []
        return f"features/{digest_of(identity)[:12]}"


@dataclass(frozen=True)
class FeaturePart:
    """Some rows of a split, and the key below the source's folder under which their features are kept."""

    source: FeatureSource
    split: str
    rows: range
    key: str


def plan_parts(source: FeatureSource, manifest: Manifest, split: str) -> list[FeaturePart]:
    """The parts of a split in row order: whole row groups of one segment, about PART_ROWS rows each."""
    info = manifest.split(split)
    step = -(-PART_ROWS // info.rows_per_row_group) * info.rows_per_row_group
    parts, first_row = [], 0
    for segment in info.segments:
        place = "/".join(filter(None, (segment.version, segment.split, segment.name)))
        for start in range(0, segment.num_rows, step):
            stop = min(start + step, segment.num_rows)
            rows = range(first_row + start, first_row + stop)
            parts.append(FeaturePart(source, split, rows, f"{place}/{start:09d}-{stop:09d}.safetensors"))
        first_row += segment.num_rows
    return parts


def work_chunks(parts: Sequence[FeaturePart], num_workers: int, most: int = 16) -> list[list[FeaturePart]]:
    """Parts in the portions that workers take: following ones of one split, through which a worker runs without a pause.

    There are 16 for each worker, so that all end at about the same time, or smaller ones of `most` parts.
    """
    size = max(1, min(most, len(parts) // (16 * num_workers)))
    portions = []
    for _, group in groupby(parts, key=lambda part: (part.source, part.split)):
        of_split = list(group)
        portions += [of_split[i : i + size] for i in range(0, len(of_split), size)]
    return portions
