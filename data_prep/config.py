"""What a corpus is made from and how. Imports neither torch nor Ray: forms and command lines load it.

A field is in `recipe` (or in the source) if it decides what the corpus holds; `execution` decides how it is computed.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from data_prep.decode import DecodePolicy
from infra.config import FrozenConfig

Fraction = Annotated[float, Field(ge=0, lt=1)]
SplitName = Literal["train", "val", "test"]
TopFolders = Literal["auto", "splits", "classes"]
CorpusName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]


class ClassFolders(FrozenConfig):
    """Folders of pictures, one per class, of any depth. Top-level train, val and test folders are taken as splits, unless
    pictures lie beside them: see `top_folders`."""

    kind: Literal["class_folders"] = "class_folders"
    path: str
    """The folder, or one archive of it (.tar, .tar.gz, .tgz, .zip); a path that every worker sees, file:// or s3://."""
    links: Literal["follow", "second_label", "skip"] = "follow"
    """Symbolic links: read what they point to as examples of their own; take their folder as a further label of the
    picture they point to, so that the corpus has several labels a picture; or list them as refused."""
    top_folders: TopFolders = "auto"
    """What top-level folders called train, val and test are. Auto: splits where no other folder with pictures lies beside
    them; train alone beside others is a class; both val or test and others beside train are an error. Splits: what lies in
    no such folder is left out. Classes: the names mean nothing."""


class ImageNet21k(FrozenConfig):
    """ImageNet-21k as distributed: a tar of one tar per synset, or a folder of these tars."""

    kind: Literal["imagenet21k"] = "imagenet21k"
    path: str
    """The archive (fall11_whole.tar, winter21_whole.tar.gz) or the folder of n01440764.tar and so on."""


class Ilsvrc2012(FrozenConfig):
    """ImageNet-1k as distributed: training and validation archives and the development kit with the labels."""

    kind: Literal["ilsvrc2012"] = "ilsvrc2012"
    path: str
    """Folder of ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz."""
    validation_is: Literal["val", "test"] = "test"
    """Split of the 50,000 validation images. Test: val is hashed off train by val_fraction, as the paper does."""


class LabelTable(FrozenConfig):
    """A table of image locations and labels, as JFT is: CSV, JSON lines or Parquet, one or several labels an image."""

    kind: Literal["table"] = "table"
    path: str
    """The table, or a folder of tables of one kind."""
    images: str = ""
    """Folder or prefix that relative locations start from. Empty: the folder of the table."""
    image_column: str = "image"
    """Column of the location: a path, or a URI."""
    labels_column: str = "labels"
    """Column of the labels: a list, or one text."""
    label_separator: str = ""
    """What separates several labels in one text, such as a blank. Empty: the text is one label."""
    weights_column: str = ""
    """Column of the confidences, one for each label, in the same form. Empty: none."""
    id_column: str = ""
    """Column of the example id. Empty: the location is the id."""
    split_column: str = ""
    """Column of the split (train, val, test). Empty: splits are drawn."""
    group_column: str = ""
    """Column of what belongs together in one split. Empty: nothing does."""
    single_label: bool = False
    """Whether every image has exactly one label."""


class WebDataset(FrozenConfig):
    """WebDataset tars: files of one base name are one example."""

    kind: Literal["webdataset"] = "webdataset"
    path: str
    """A tar, or a folder of tars; sub-folders train, val and test, or such a word in the name of a tar, are splits."""
    image_keys: tuple[str, ...] = ("jpg", "jpeg", "png", "webp", "ppm")
    """Endings of the image, the first that an example has."""
    label_key: str = "cls"
    """Ending of the label: a number or text (cls, txt), or json."""
    label_field: str = "label"
    """Field of a json label: a number, a text or a list of them."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class ParquetImages(FrozenConfig):
    """Parquet files with an image column: bytes, or the Hugging Face struct of bytes and path."""

    kind: Literal["parquet"] = "parquet"
    path: str
    """A file, or a folder of files; splits by the names of folders and files, as on the Hugging Face Hub."""
    image_column: str = "image"
    label_column: str = "label"
    """A number, a text or a list of them. Names of numbers are taken from a declared ClassLabel."""
    id_column: str = ""
    """Column of the example id. Empty: file and row number."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class TfdsDirectory(FrozenConfig):
    """A directory written by TensorFlow Datasets (with dataset_info.json), read without TensorFlow. Ids are positions in
    its order, as in train/00000799."""

    kind: Literal["tfds"] = "tfds"
    path: str
    """The directory of one version, as in oxford_flowers102/2.1.1."""
    image_feature: str = "image"
    label_feature: str = "label"
    """A ClassLabel, an integer, or a sequence of either."""
    splits: dict[str, SplitName] = Field(
        default_factory=lambda: dict[str, SplitName](train="train", validation="val", test="test")
    )
    """Splits to take, and what they are here."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class ImageArrays(FrozenConfig):
    """Pixel arrays, stored as lossless PNG: CIFAR's binary archives, idx files as of MNIST, npz."""

    kind: Literal["arrays"] = "arrays"
    path: str
    """cifar-10-binary.tar.gz or cifar-100-binary.tar.gz; a folder of idx files (plain or .gz); an .npz of images and
    labels (x_train, y_train, x_test, y_test, or images and labels)."""
    layout: Literal["cifar10", "cifar100", "cifar100_coarse", "idx", "npz"]


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


VtabTaskName = Literal[
    "caltech101",
    "cifar100",
    "dtd",
    "flowers102",
    "pets",
    "sun397",
    "svhn",
    "patch_camelyon",
    "eurosat",
    "resisc45",
    "diabetic_retinopathy",
    "clevr_count",
    "clevr_distance",
    "dmlab",
    "dsprites_location",
    "dsprites_orientation",
    "kitti_distance",
    "smallnorb_azimuth",
    "smallnorb_elevation",
]


class Vtab(FrozenConfig):
    """A task of VTAB with exactly the examples that the paper takes, from the official files of its data set or from what
    TensorFlow Datasets has prepared of it."""

    kind: Literal["vtab"] = "vtab"
    task: VtabTaskName
    path: str
    """Folder of the files as they are distributed; `vitline vtab files` says which and where from. Or the directory of one
    version that TFDS has written, with its dataset_info.json."""


TransferTaskName = Literal["imagenet", "imagenet-real", "imagenet-v2", "cifar10", "cifar100", "pets", "flowers102"]


class Transfer(FrozenConfig):
    """A data set that the ViT paper transfers to beside VTAB, as it is used there: val is the share of train that the
    paper chooses a learning rate on, trainval is all of train. Of `imagenet-real` and `imagenet-v2` there is test only."""

    kind: Literal["transfer"] = "transfer"
    task: TransferTaskName
    path: str
    """Folder of the files as they are distributed; `vitline vtab files` says which and where from. Of CIFAR, Pets and
    Flowers also the directory of one version that TFDS has written."""


Source = Annotated[
    ClassFolders
    | ImageNet21k
    | Ilsvrc2012
    | LabelTable
    | WebDataset
    | ParquetImages
    | TfdsDirectory
    | ImageArrays
    | Emoji
    | Digits
    | Vtab
    | Transfer,
    Field(discriminator="kind"),
]


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
    """Share of the pictures in val, where the source names no splits; copies of a picture count once."""
    test_fraction: Fraction = 0.1
    """Share of the pictures in test, where the source names no splits; copies of a picture count once."""
    order_seed: NonNegativeInt = 0
    """Seed of the order of the rows. Splits do not depend on it."""
    decode: DecodePolicy = DecodePolicy()
    """Limits of images, and what is done with the odd ones."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Pictures with the same pixels: keep one, or all that are in one split. Two splits never share a picture, and copies
    make no split more likely. Where a
    picture may have several labels, the one that stays gets the labels of its copies too, with the larger weights."""
    min_images_per_class: PositiveInt = 1
    """Classes with fewer accepted pictures are left out."""
    val_per_class: PositiveInt | None = None
    """So many pictures of every class are val, in place of val_fraction, where the source names no val split. Those of
    a class that has not twice as many stay in train. (50 in ImageNet-21k-P.)"""
    class_map: str = ""
    """Classes to keep and the order of their ids: a release of ImageNet by name (imagenet21k-fall11, -google, -p ...), the
    URI of a file (a classes.json, or one source id a line), or NAME=URI, a file that is checked to be that release.
    Empty: all classes of the source, by source id."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Pictures of this corpus that look alike (scaled, recompressed, mirrored...): keep all, or one of each.
    With `add_to` among the new pictures; those that were there are not compared."""
    decontaminate: tuple[str, ...] = ()
    """Prepared corpora, NAME or NAME/VERSION, whose test and val pictures, and what looks like them, are left out here."""
    sharding: ShardingConfig = ShardingConfig()

    @model_validator(mode="after")
    def _train_is_left(self) -> "CorpusRecipe":
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave nothing to train on; "
                "their sum must be below 1."
            )
        if self.near_duplicates == "drop" and self.duplicates == "keep":
            raise ValueError(
                "near_duplicates 'drop' with duplicates 'keep' would keep equal pictures and drop similar ones."
            )
        return self


class PrepareExecution(FrozenConfig):
    """How the corpus is computed; the result is the same for every choice."""

    examples_per_chunk: PositiveInt = 512
    """Examples examined by one task: the unit of restart. An archive inside the source is one task, whatever it holds."""
    small_images: NonNegativeInt = 8192
    """A source of at most so many images, and 1 GiB, is prepared by one process, which is done sooner than a cluster
    starts; where no cluster is named, 12 times as many. 0: on Ray, however small."""
    sort_bytes: PositiveInt = 64 * 1024 * 1024
    """Bytes of record files, some 180 an image, that one planning task sorts. It needs some 14 times that in memory: 0.9 GB
    at 64 MiB."""
    image_timeout_s: PositiveFloat = 60.0
    """Longest decoding of one image; it is refused as decoder_crash behind it."""
    decode_memory_bytes: Annotated[int, Field(ge=1 << 30)] = 4 << 30
    """Address space of the process that decodes, whose death costs one image."""
    max_refused_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Above this share of refused pictures nothing is published. Duplicates and files that are no pictures by their
    name do not count."""
    uncounted_losses: Literal["refuse", "accept"] = "refuse"
    """Archives, files and folders that cannot be read to their end, so that nobody knows how much is missing: publish
    nothing; or publish what was read, and say so in the report."""


class CorpusConfig(FrozenConfig):
    """A request for one corpus."""

    name: CorpusName
    """Name under which the corpus is found."""
    source: Source
    recipe: CorpusRecipe = CorpusRecipe()
    add_to: str = ""
    """A prepared corpus of this name, NAME/VERSION, that gets these images as a further segment; its shards are listed
    unchanged. Empty: a corpus of its own."""
    execution: PrepareExecution = PrepareExecution()
