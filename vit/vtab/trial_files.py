"""What a final trial leaves beside its result, for people: predictions, confusions, a table by class, hardest examples.

    <root>/trials/<trial key>/<12 hex of the predictions>/predictions.parquet
                                                         /per_class.csv
                                                         /confusion.csv, or confused_pairs.csv above 200 classes
                                                         /confusion.png           up to 50 classes
                                                         /hardest.html

The folder is named by its content: of two workers that ran one trial at once, the result that stays names its own.
"""

import logging
from collections.abc import Iterator

from data_prep.shard_format import Manifest, load_class_names, load_manifest
from infra.storage import Store, open_store
from vit.vtab.confusion import (
    MAX_CLASSES_DRAWN,
    MAX_CLASSES_IN_FULL,
    confused_pairs_csv,
    confusion,
    confusion_csv,
    distinct,
    draw_confusion,
    per_class_csv,
)
from vit.vtab.hardest import hardest_page
from vit.vtab.predictions import Predictions

log = logging.getLogger(__name__)
PREDICTIONS = "predictions.parquet"


def write_trial_files(
    trials: Store, trial_key: str, predictions: Predictions, corpus_uri: str, split: str, title: str
) -> tuple[str, ...]:
    """Writes the files; returns their keys below `trials`, the predictions first.

    No score is lost for a table or a picture: an error in making one is logged, and the files so far are returned. That
    the predictions themselves cannot be written is raised.
    """
    folder = f"{trial_key}/{predictions.digest[:12]}"
    keys = [f"{folder}/{PREDICTIONS}"]
    trials.write(keys[0], predictions.to_parquet())
    try:
        corpus = open_store(corpus_uri)
        for name, data in show_predictions(predictions, corpus, load_manifest(corpus), split, title):
            trials.write(f"{folder}/{name}", data)
            keys.append(f"{folder}/{name}")
    except Exception:
        log.warning("what %s predicted could not be shown whole", trial_key, exc_info=True)
    return tuple(keys)


def show_predictions(
    predictions: Predictions, corpus: Store, manifest: Manifest, split: str, title: str
) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file that people look at. `title` says which model, on which task."""
    names = distinct(load_class_names(corpus))
    yield "per_class.csv", per_class_csv(predictions, names).encode()
    if len(names) <= MAX_CLASSES_IN_FULL:
        counts = confusion(predictions, len(names))
        yield "confusion.csv", confusion_csv(counts, names).encode()
        if len(names) <= MAX_CLASSES_DRAWN:
            caption = f"{title}: {len(predictions):,} of {split}, {100 * predictions.right.mean():.1f} % right"
            yield "confusion.png", draw_confusion(counts, names, caption)
    else:
        yield "confused_pairs.csv", confused_pairs_csv(predictions, names).encode()
    yield "hardest.html", hardest_page(predictions, corpus, manifest, split, names, title).encode()
