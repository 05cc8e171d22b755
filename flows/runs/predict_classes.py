"""model and corpus -> predicted classes in Parquet files, by one Ray job."""

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import StageResult, run_stage, run_store
from vitline.infra.html.text import percent
from vitline.infra.storage import open_store
from vitline.vit.features.prediction_plan import FOLDER, PredictionSpec, plan_predictions, predictions_exist
from vitline.vit.run.run_spec import read_progress


def predict_classes(spec: PredictionSpec, services: Services) -> StageResult:
    """Computes the missing parts, or returns the finished run. Raises StageFailed, Skipped."""
    run, manifest = run_store(services.root, spec.run_key), load_manifest(open_store(spec.corpus))
    num_parts = len(plan_predictions(spec, manifest))
    return run_stage(
        services,
        spec,
        "vitline.vit.ray_jobs.task_driver",
        title=f"predict {manifest.name}",
        progress=lambda: read_progress(run),
        output=lambda state: predictions_exist(run, num_parts),
        grace_s=10,
    )


def folder_of(spec: PredictionSpec) -> str:
    """URI of the folder with the files."""
    return run_store(spec.root, spec.run_key).uri_of(FOLDER)


def prediction_rows(spec: PredictionSpec, result: StageResult) -> list[list[str]]:
    """What was predicted, as rows of name and value."""
    counts = result.state["predicted"]
    rows = [["images", f"{counts['images']:,}"], ["files", folder_of(spec)]]
    if counts["known"]:
        right = percent(counts["hits"] / counts["known"])
        rows.insert(1, ["top-1", f"{right} of the {counts['known']:,} images with a label that the model knows"])
    return rows


def prediction_sentence(spec: PredictionSpec, result: StageResult) -> str:
    """`1,797 images, top-1 97.1 %: <URI>`"""
    counts = result.state["predicted"]
    score = f", top-1 {percent(counts['hits'] / counts['known'])}" if counts["known"] else ""
    reused = " (predicted before)" if result.reused else ""
    return f"{counts['images']:,} images{score}: {folder_of(spec)}{reused}"
