"""The kinds of sources by name, for the command line and the forms. Imports nothing, so that both load fast."""

from typing import Literal

SourceKind = Literal[
    "class_folders", "imagenet21k", "ilsvrc2012", "table", "webdataset", "parquet", "predictions", "tfds", "arrays",
    "vtab", "transfer",
]  # fmt: skip
