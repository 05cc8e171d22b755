"""What people choose from by name, on the command line and in forms; nothing is imported for it."""

from typing import Literal

SourceKind = Literal[
    "class_folders", "imagenet21k", "ilsvrc2012", "table", "webdataset", "parquet", "tfds", "arrays", "vtab",
    "transfer",
]  # fmt: skip
