"""The files that a final trial stores beside its result: predictions, confusions, a table by class, calibration, top losses.

    <root>/trials/<trial key>/<12 hex of the predictions>/predictions.parquet
                                                         /per_class.csv
                                                         /confusion.csv, or confused_pairs.csv above 200 classes
                                                         /confusion.png           up to 50 classes
                                                         /reliability.png
                                                         /top_losses.html

The folder is named after its content. If two workers run the same trial at once, the stored result names its own files.
"""

import logging
from collections.abc import Callable, Mapping

from vitline.data_prep.shard_format import Manifest, load_class_names, load_manifest
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.calibration import calibration_of, draw_reliability
from vitline.vit.evaluation.confusion import (
    MAX_CLASSES_DRAWN,
    MAX_CLASSES_IN_FULL,
    confused_pairs_csv,
    confusion,
    confusion_csv,
    distinct,
    draw_confusion,
    per_class_csv,
)
from vitline.vit.evaluation.top_losses import top_losses_page
from vitline.vit.training.predictions import Predictions

log = logging.getLogger(__name__)
PREDICTIONS, RELIABILITY = "predictions.parquet", "reliability.png"


def write_trial_files(
    trials: Store, trial_key: str, predictions: Predictions, corpus_uri: str, split: str, title: str
) -> tuple[str, ...]:
    """Writes the files and returns their keys below `trials`, the predictions first. Errors as of `write_figures`."""
    folder = f"{trial_key}/{predictions.digest[:12]}"
    first = f"{folder}/{PREDICTIONS}"
    trials.write(first, predictions.to_parquet())
    corpus = open_store(corpus_uri)
    figures = trial_figures(predictions, corpus, load_manifest(corpus), split, title)
    return (first, *write_figures(trials, folder, figures))


def write_figures(trials: Store, folder: str, figures: Mapping[str, Callable[[], bytes]]) -> tuple[str, ...]:
    """Writes tables and figures into a folder of `trials`, by file name, and returns their keys.

    One that cannot be made is logged and left out, so that it does not cost the score. Errors of the store are raised.
    """
    keys = []
    for name, make in figures.items():
        try:
            data = make()
        except Exception:
            log.warning("file=%s folder=%s could not be made and is left out", name, folder, exc_info=True)
            continue
        keys.append(f"{folder}/{name}")
        trials.write(keys[-1], data)
    return tuple(keys)


def trial_figures(
    predictions: Predictions, corpus: Store, manifest: Manifest, split: str, title: str
) -> dict[str, Callable[[], bytes]]:
    """The function that makes each table and figure, by file name. `title` names model and task."""
    names = distinct(load_class_names(corpus))
    caption = f"{title}: {len(predictions):,} examples of {split}, {100 * predictions.right.mean():.1f} % correct"
    files: dict[str, Callable[[], bytes]] = {
        "per_class.csv": lambda: per_class_csv(predictions, names).encode(),
        "top_losses.html": lambda: top_losses_page(predictions, corpus, manifest, split, names, title).encode(),
    }
    if calibration := calibration_of(predictions.probability, predictions.right):
        files[RELIABILITY] = lambda: draw_reliability(calibration, caption)
    if len(names) > MAX_CLASSES_IN_FULL:
        return files | {"confused_pairs.csv": lambda: confused_pairs_csv(predictions, names).encode()}
    counts = confusion(predictions, len(names))
    files["confusion.csv"] = lambda: confusion_csv(counts, names).encode()
    if len(names) <= MAX_CLASSES_DRAWN:
        files["confusion.png"] = lambda: draw_confusion(counts, names, caption)
    return files
