"""What a run of batch prediction computes, and where it stores it. Imports no torch.

<root>/runs/<run key>/predictions/<split>/<segment>/000000000-000000512.parquet   rows of a segment
"""

from vitline.data_prep.shard_format import Manifest
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store
from vitline.vit.features.feature_plan import PART_ROWS, FeaturePart, FeatureSource, plan_parts

FOLDER = "predictions"
"""Of the run."""
MOST_PARTS = 256
"""About as many files has a split, of any size: each is computed at once, so a kill loses that part of its rows for each worker."""


class PredictionSpec(FrozenConfig):
    """`config.json` of a batch prediction: the classes that a model gives to the images of a corpus."""

    schema_version: int = 1
    run_key: str
    model: str
    """URI of the published model."""
    model_digest: str
    corpus: str
    """URI of the prepared corpus."""
    corpus_digest: str
    decode_digest: str
    splits: tuple[str, ...]
    top_k: int
    """Number of classes of each image, the most probable first."""
    root: str


class PredictionSource(FeatureSource):
    """Model and corpus of predictions."""

    run_key: str
    top_k: int

    @property
    def folder(self) -> str:
        """Below the root."""
        return f"runs/{self.run_key}/{FOLDER}"


def plan_predictions(spec: PredictionSpec, manifest: Manifest) -> list[FeaturePart]:
    """The parts of all splits. A part is whole row groups of one segment."""
    source = PredictionSource(
        model=spec.model,
        model_digest=spec.model_digest,
        corpus=spec.corpus,
        corpus_digest=spec.corpus_digest,
        decode_digest=spec.decode_digest,
        run_key=spec.run_key,
        top_k=spec.top_k,
    )
    return [
        part
        for split in spec.splits
        for part in plan_parts(
            source, manifest, split, max(PART_ROWS, manifest.split(split).num_rows // MOST_PARTS), "parquet"
        )
    ]


def predictions_exist(run: Store, num_parts: int) -> bool:
    """Whether the folder of a finished run still has all its parts."""
    return len(run.list(f"{FOLDER}/")) >= num_parts
