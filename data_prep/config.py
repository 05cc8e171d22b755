"""What a corpus is made from and how. Imports neither torch nor Ray: forms and command lines load it.

A field is in `recipe` (or in the source) if it decides what the corpus holds; `execution` decides how it is computed.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from data_prep.decode import DecodePolicy
from infra.config import FrozenConfig

Fraction = Annotated[float, Field(ge=0, lt=1)]
CorpusName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]


class ClassFolders(FrozenConfig):
    """A folder of class folders of any depth. Top-level train, val and test folders are taken as splits."""

    kind: Literal["class_folders"] = "class_folders"
    path: str
    """The folder, on a disk that every worker sees."""
    links: Literal["follow", "skip"] = "follow"
    """Symbolic links: read what they point to, or list them as refused."""


class Emoji(FrozenConfig):
    """64-pixel emoji of the npm packages emoji-datasource-google and -twitter; classes are their subcategories."""

    kind: Literal["emoji"] = "emoji"
    style: Literal["google", "twitter"]
    """Noto or Twitter pictures."""
    role: Literal["pretrain", "task"]
    """Pretrain: all skin tones of the emoji that are in no test split. Task: base pictures of the larger classes."""
    num_train: PositiveInt = 800
    """Task pictures in train; whole groups of variants stay together."""
    num_val: PositiveInt = 200
    """Task pictures in val; what is left is test."""
    min_bases_per_class: PositiveInt = 10
    """Smallest class of the task."""
    cache: str = ""
    """URI of a folder that keeps the packages, seen by every worker. Empty: `sources` under the root."""


class Digits(FrozenConfig):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 grey, as lossless PNG."""

    kind: Literal["digits"] = "digits"
    digits: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    """Which of the ten classes."""
    num_train: PositiveInt = 800
    num_val: PositiveInt = 200
    """What is left after train and val is test."""


Source = Annotated[ClassFolders | Emoji | Digits, Field(discriminator="kind")]


class ShardingConfig(FrozenConfig):
    """How rows become row groups and shards: a function of the data alone, never of the parallelism."""

    row_group_bytes: PositiveInt = 8 * 1024 * 1024
    """Mean image bytes of a row group."""
    min_row_groups: PositiveInt = 256
    """Fewest row groups of a split that has as many rows: lanes and shuffling need them."""
    shard_bytes: PositiveInt = 256 * 1024 * 1024
    """Mean image bytes of a shard."""


class CorpusRecipe(FrozenConfig):
    """What the content of the corpus depends on beside its source."""

    val_fraction: Fraction = 0.1
    """Share of the examples in val, where the source names no splits."""
    test_fraction: Fraction = 0.1
    """Share of the examples in test, where the source names no splits."""
    order_seed: NonNegativeInt = 0
    """Seed of the order of the rows. Splits do not depend on it."""
    decode: DecodePolicy = DecodePolicy()
    """Limits of images, and what is done with the odd ones."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Pictures with the same pixels: keep one, or all that are in one split. Two splits never share a picture."""
    min_images_per_class: PositiveInt = 1
    """Classes with fewer accepted pictures are left out."""
    sharding: ShardingConfig = ShardingConfig()

    @model_validator(mode="after")
    def _train_is_left(self) -> "CorpusRecipe":
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave nothing to train on; "
                "their sum must be below 1."
            )
        return self


class PrepareExecution(FrozenConfig):
    """How the corpus is computed; the result is the same for every choice."""

    examples_per_chunk: PositiveInt = 512
    """Examples examined by one task: the unit of restart."""
    max_refused_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Above this share of refused pictures nothing is published. Duplicates and files that are no pictures by their
    name do not count."""


class CorpusConfig(FrozenConfig):
    """A request for one corpus."""

    name: CorpusName
    """Name under which the corpus is found."""
    source: Source
    recipe: CorpusRecipe = CorpusRecipe()
    execution: PrepareExecution = PrepareExecution()
