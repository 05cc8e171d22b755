"""The run snapshot of a batch prediction: where its files are, and how many classes were right. Imports no MLflow and no torch."""

from vitline.flows.catalog.stored_configs import PredictionFile
from vitline.flows.to_mlflow.run_snapshot import RunView, corpus_use, makers, stored_manifest
from vitline.infra.config import digest_of
from vitline.infra.runs.run_state import RunStateRecord
from vitline.vit.features.prediction_plan import FOLDER
from vitline.vit.published.model_record import model_record


def show_prediction(snapshot: RunView, spec: PredictionFile, state: RunStateRecord) -> None:
    """Counts, rate and top-1 of the images that have a label which the model knows."""
    manifest, record, splits = stored_manifest(spec["corpus"]), model_record(spec["model"]), spec["splits"]
    snapshot.params = {
        "model": "/".join(spec["model"].rstrip("/").split("/")[-2:]),
        "corpus": manifest["name"] if manifest else None,
        "splits": ", ".join(splits),
        "top_k": spec["top_k"],
    }
    snapshot.tags |= {
        "mlflow.source.name": "vitline predict",
        "vitline.config_digest": digest_of([splits, spec["top_k"]]),
        "vitline.model_uri": spec["model"],
        "vitline.model_digest": record["digest"] if record else None,
        "vitline.corpus_digest": manifest["digest"] if manifest else None,
    }
    if manifest:
        snapshot.corpora = [corpus_use(spec["corpus"], manifest, split, split) for split in splits]
    snapshot.model_inputs = makers([record])
    snapshot.facts += [f"**Predictions:** `{snapshot.store_uri.rstrip('/')}/{FOLDER}`"]
    if (counts := state.get("predicted")) and snapshot.end_ms:
        seconds = max((snapshot.end_ms - snapshot.start_ms) / 1000, 1e-3)
        snapshot.values = {
            "predict/images": (counts["images"], 0),
            "time/predict_s": (seconds, 0),
            **({"predict/top1": (counts["hits"] / counts["known"], 0)} if counts["known"] else {}),
        }
