"""Opens the source of a request. A new kind of source needs one file and one entry here."""

from pkgutil import resolve_name

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.sources.raw import ImageSource

_READERS = {
    "class_folders": "sources.class_folders.ClassFolderCorpus",
    "imagenet21k": "sources.imagenet.imagenet21k.ImageNet21kCorpus",
    "ilsvrc2012": "sources.imagenet.ilsvrc2012.Ilsvrc2012Corpus",
    "table": "sources.label_table.LabelTableCorpus",
    "webdataset": "sources.webdataset.WebDatasetCorpus",
    "parquet": "sources.parquet_images.ParquetCorpus",
    "predictions": "sources.predicted_classes.PredictedCorpus",
    "tfds": "sources.tfds.TfdsCorpus",
    "arrays": "sources.arrays.image_arrays.ImageArraysCorpus",
    "icons": "examples.icons.IconCorpus",
    "letters": "examples.letters.LetterCorpus",
    "digits": "examples.digits.DigitsCorpus",
    "vtab": "benchmarks.registry.open_task",
    "transfer": "benchmarks.registry.open_task",
}


def open_source(config: CorpusConfig) -> ImageSource:
    """The source of a request; nothing is read yet. Imports only the libraries that this source needs."""
    reader = resolve_name(f"vitline.data_prep.{_READERS[config.source.kind]}")
    source: ImageSource = reader(config.source, config.recipe)
    return source
