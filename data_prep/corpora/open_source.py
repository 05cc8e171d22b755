"""A source from its config. A new source is one file and one line here."""

import importlib

from data_prep.config import CorpusConfig
from data_prep.corpora.raw import RawCorpus

_READERS = {
    "class_folders": "class_folders.ClassFolderCorpus",
    "imagenet21k": "imagenet21k.ImageNet21kCorpus",
    "ilsvrc2012": "ilsvrc2012.Ilsvrc2012Corpus",
    "table": "label_table.LabelTableCorpus",
    "webdataset": "webdataset.WebDatasetCorpus",
    "parquet": "parquet_images.ParquetCorpus",
    "tfds": "tfds.TfdsCorpus",
    "arrays": "image_arrays.ImageArraysCorpus",
    "emoji": "emoji.EmojiCorpus",
    "digits": "digits.DigitsCorpus",
    "vtab": "vtab.vtab_corpus.open_task",
    "transfer": "transfer.transfer_corpus.open_task",
}


def open_source(config: CorpusConfig) -> RawCorpus:
    """The source of a request; nothing is read yet. Only the library that the source needs is imported."""
    module, _, name = _READERS[config.source.kind].rpartition(".")
    reader = getattr(importlib.import_module(f"data_prep.corpora.{module}"), name)
    return reader(config.source, config.recipe)
