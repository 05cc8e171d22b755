"""Request for a corpus: its source, its recipe and how to compute it. Forms and CLI import it, so no torch and no Ray here.

A field belongs to the source or to `recipe` if it changes the content of the corpus, and to `execution` otherwise.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.config import FrozenConfig, omitted_at_default

Fraction = Annotated[float, Field(ge=0, lt=1)]
SplitName = Literal["train", "val", "test"]
SplitPatterns = dict[Annotated[str, Field(pattern=r"^[^/].*$")], SplitName]
CorpusName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]


def _absolute(root: str) -> str:
    """A root that means the same on every worker. Raises ValueError for a relative path."""
    if "://" not in root and not root.startswith("/"):
        raise ValueError(f"{root!r} is a relative path; give an absolute path, file:///path or s3://bucket/prefix")
    return root


Root = Annotated[str, AfterValidator(_absolute)]


class ClassFolders(FrozenConfig):
    """Folders of images, one folder per class, nested to any depth. Folders whose names say together that they are splits (train and
    val, seg_train and seg_test, training_set and test_set) become splits, and folders around everything are left out of the classes.
    A tree that can be read in two ways is refused: see `top_folders` and `splits`. A dry run shows how it is read."""

    kind: Literal["class_folders"] = "class_folders"
    path: str
    """Folder, or one archive of it (.tar, .tar.gz, .tgz, .zip): a path that every worker can read, or the URI of a bucket."""
    links: Literal["follow", "second_label", "skip"] = "follow"
    """What to do with symbolic links. follow: read the target as an example of its own. second_label: add the class of the
    link's folder to the labels of the target, so that images can have several labels. skip: refuse the link."""
    allowed_roots: tuple[Root, ...] = ()
    """Absolute paths of folders outside of `path` that links may lead to. Other links that leave `path` are refused. Links in
    archives may lead to other members only."""
    top_folders: Literal["auto", "splits", "classes"] = "auto"
    """How to treat folders whose names are those of splits, at the top or below folders that surround everything. auto: they are splits
    if all folders there are, a lone train beside others is a class, and what is not certain is an error. splits: folders with such
    names are always splits, and images outside of them are left out. classes: the names have no special meaning."""
    splits: SplitPatterns = omitted_at_default({})
    """Split of each folder by its path, such as {"pets/training": "train", "*/held_out": "test"}: `*` is any folder, and part of the
    class. Images outside of these folders are left out. Empty: as `top_folders` says."""


class ImageNet21k(FrozenConfig):
    """ImageNet-21k as distributed: one tar that holds a tar per synset, or a folder of the inner tars."""

    kind: Literal["imagenet21k"] = "imagenet21k"
    path: str
    """The archive (fall11_whole.tar, winter21_whole.tar.gz), or the folder with n01440764.tar and the other inner tars."""


class Ilsvrc2012(FrozenConfig):
    """ImageNet-1k as distributed: training archive, validation archive and the development kit with the labels."""

    kind: Literal["ilsvrc2012"] = "ilsvrc2012"
    path: str
    """Folder with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz."""
    validation_is: Literal["val", "test"] = "test"
    """Split that the 50,000 validation images become. With test, val is drawn from train by val_fraction, as in the paper."""


class LabelTable(FrozenConfig):
    """A table of image locations and labels, as JFT is: CSV, JSON lines or Parquet, with one or several labels per image."""

    kind: Literal["table"] = "table"
    path: str
    """The table, or a folder of tables of the same format."""
    images: str = ""
    """Folder or URI prefix that relative locations are resolved against. Empty: the folder of the table. Locations outside of
    it, absolute ones and those that links lead to, are refused unless `allowed_roots` names their place."""
    allowed_roots: tuple[Root, ...] = ()
    """Further places of images, and of tables that links lead to: absolute paths of folders, and URI prefixes such as
    s3://bucket/photos."""
    image_column: str = "image"
    """Column with the location of the image: a path or a URI."""
    labels_column: str = "labels"
    """Column with the labels: a list, or one text."""
    label_separator: str = ""
    """Separator between several labels in one text, such as a space. Empty: the text is one label."""
    weights_column: str = ""
    """Column with the confidences, one per label, in the same form as the labels. Empty: no weights."""
    id_column: str = ""
    """Column with the example id. Empty: the location is the id."""
    split_column: str = ""
    """Column with the split (train, val, test). Empty: splits are drawn by hash."""
    group_column: str = ""
    """Column with the group: examples of one group get the same split. Empty: no groups."""
    single_label: bool = False
    """Whether every image has exactly one label."""


class WebDataset(FrozenConfig):
    """WebDataset tars: files with the same name up to the first known extension form one example, also if they stand apart."""

    kind: Literal["webdataset"] = "webdataset"
    path: str
    """A tar, or a folder of tars. Words such as train, val and test in the names of folders or tars become splits if those of all tars
    name one: see `splits`."""
    image_keys: tuple[str, ...] = ("jpg", "jpeg", "png", "webp", "ppm")
    """File extensions of the image, in order of preference."""
    label_key: str = "cls"
    """File extension of the label: a number or text (cls, txt), or json."""
    label_field: str = "label"
    """Field of a json label: a number, a text or a list of these."""
    allowed_roots: tuple[Root, ...] = omitted_at_default(())
    """Absolute paths of folders outside of `path` that links may lead to. Other links that leave `path` are an error."""
    splits: SplitPatterns = omitted_at_default({})
    """Split of each file by a pattern of its path or folder, such as {"train-*": "train", "lab/2024": "test"}; other files are left
    out. {"*": "train"}: no name says a split. Empty: by the names, if all of them say it. A dry run shows what was understood."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class ParquetImages(FrozenConfig):
    """Parquet files with an image column: bytes, or Hugging Face's struct of bytes and path."""

    kind: Literal["parquet"] = "parquet"
    path: str
    """A file, or a folder of files. Words such as train, val and test in the names of folders or files become splits if those of all
    files name one, as on the Hugging Face Hub: see `splits`."""
    image_column: str = "image"
    label_column: str = "label"
    """A number, a text or a list of these. Numbers get their names from a declared ClassLabel."""
    id_column: str = ""
    """Column with the example id. Empty: file name and row number."""
    allowed_roots: tuple[Root, ...] = omitted_at_default(())
    """Absolute paths of folders outside of `path` that links may lead to. Other links that leave `path` are an error."""
    splits: SplitPatterns = omitted_at_default({})
    """Split of each file by a pattern of its path or folder, such as {"train-*": "train", "lab/2024": "test"}; other files are left
    out. {"*": "train"}: no name says a split. Empty: by the names, if all of them say it. A dry run shows what was understood."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class PredictedClasses(FrozenConfig):
    """The images of a batch prediction with the classes that its model gave them, for a student to train on. Splits are drawn anew, so
    predict only splits whose images may be trained on."""

    kind: Literal["predictions"] = "predictions"
    path: str
    """The run of the prediction, `<root>/runs/<run key>`, as `vitline runs ls` lists it."""
    labels: Literal["soft", "hard"] = "soft"
    """soft: the classes that were stored for an image (`top_k` of the prediction) with their probabilities, scaled to sum to 1, as
    weights. hard: only the most probable class."""
    min_score: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Images whose most probable class has a lower probability are left out; 0.3 as in the noisy student paper."""
    max_per_class: PositiveInt | None = None
    """Images of the same most probable class that are used, those of the highest probability. Empty: all."""


class TfdsDirectory(FrozenConfig):
    """A directory written by TensorFlow Datasets (with dataset_info.json), read without TensorFlow. Example ids are positions
    in its order, such as train/00000799."""

    kind: Literal["tfds"] = "tfds"
    path: str
    """The directory of one version, such as oxford_flowers102/2.1.1."""
    image_feature: str = "image"
    label_feature: str = "label"
    """A ClassLabel, an integer, or a sequence of these."""
    splits: dict[str, SplitName] = Field(
        default_factory=lambda: dict[str, SplitName](train="train", validation="val", test="test")
    )
    """TFDS splits to read, and the split that each becomes."""
    single_label: bool = True
    """Whether every image has exactly one label."""


class ImageArrays(FrozenConfig):
    """Pixel arrays, stored as lossless PNG: CIFAR's binary archives, idx files (as for MNIST), npz."""

    kind: Literal["arrays"] = "arrays"
    path: str
    """cifar-10-binary.tar.gz or cifar-100-binary.tar.gz; a folder of idx files (plain or .gz); or an .npz with images and
    labels (x_train, y_train, x_test, y_test, or images and labels)."""
    layout: Literal["cifar10", "cifar100", "cifar100_coarse", "idx", "npz"]


class Icons(FrozenConfig):
    """Icons of 51 open sets on npm, drawn at 64 pixels; the class is what an icon shows. The roles share no set and no class."""

    kind: Literal["icons"] = "icons"
    role: Literal["pretrain", "task"]
    """pretrain: the other things that many of 23 sets show. task: the things that most of 28 other sets show."""
    num_train: PositiveInt = 800
    """Images of the task in train; all variants of an icon stay in one split."""
    num_val: PositiveInt = 200
    """Images of the task in val; the remaining ones are test."""
    cache: str = ""
    """URI of a folder that caches the packages and that every worker can read. Empty: `sources` under the root."""


class Letters(FrozenConfig):
    """The small letters of 58 handwriting fonts on npm, drawn at 64 pixels; splits share no font."""

    kind: Literal["letters"] = "letters"
    num_train_fonts: PositiveInt = 30
    """Fonts whose 26 letters are in train."""
    num_val_fonts: PositiveInt = 8
    """Fonts in val; the remaining ones are test."""
    cache: str = ""
    """URI of a folder that caches the packages and that every worker can read. Empty: `sources` under the root."""


class Digits(FrozenConfig):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 grey levels, as lossless PNG."""

    kind: Literal["digits"] = "digits"
    digits: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    """Digits to include; each is a class."""
    num_train: PositiveInt = 800
    num_val: PositiveInt = 200
    """Images in val; those that remain after train and val are test."""


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
    """A VTAB task with exactly the examples that the paper uses, read from the official files of its data set or from a
    directory that TensorFlow Datasets prepared."""

    kind: Literal["vtab"] = "vtab"
    task: VtabTaskName
    path: str
    """Folder with the files as distributed; `vitline vtab files` lists them and where to get them. Or the directory of one
    version written by TFDS, with its dataset_info.json."""


TransferTaskName = Literal[
    "imagenet", "imagenet-real", "imagenet-v2", "cifar10", "cifar100", "pets", "flowers102",
    "imagenet-a", "imagenet-r", "imagenet-sketch", "objectnet",
    "imagenet-c-gaussian-noise", "imagenet-c-shot-noise", "imagenet-c-impulse-noise",
    "imagenet-c-defocus-blur", "imagenet-c-glass-blur", "imagenet-c-motion-blur", "imagenet-c-zoom-blur",
    "imagenet-c-snow", "imagenet-c-frost", "imagenet-c-fog", "imagenet-c-brightness",
    "imagenet-c-contrast", "imagenet-c-elastic-transform", "imagenet-c-pixelate", "imagenet-c-jpeg-compression",
]  # fmt: skip


class Transfer(FrozenConfig):
    """A data set that the ViT paper transfers to besides VTAB, with the paper's splits: val is the part of train on which the
    paper chooses a learning rate, trainval is all of train. Also test sets of ImageNet's classes, which have only a test split: ReaL, V2,
    and those of robustness (A, R, Sketch, C and ObjectNet)."""

    kind: Literal["transfer"] = "transfer"
    task: TransferTaskName
    path: str
    """Folder with the files as distributed; `vitline vtab files` lists them and where to get them. For CIFAR, Pets and
    Flowers, a directory of one version written by TFDS works too."""


Source = Annotated[
    ClassFolders
    | ImageNet21k
    | Ilsvrc2012
    | LabelTable
    | WebDataset
    | ParquetImages
    | PredictedClasses
    | TfdsDirectory
    | ImageArrays
    | Icons
    | Letters
    | Digits
    | Vtab
    | Transfer,
    Field(discriminator="kind"),
]


class ShardingConfig(FrozenConfig):
    """How rows are grouped into row groups and shards. It depends on the data only, never on the number of workers."""

    row_group_bytes: PositiveInt = 8 * 1024 * 1024
    """Mean image bytes per row group."""
    min_row_groups: PositiveInt = 256
    """Fewest row groups of a split with at least as many rows: lanes and shuffling need them."""
    shard_bytes: PositiveInt = 256 * 1024 * 1024
    """Mean image bytes per shard."""


class CorpusRecipe(FrozenConfig):
    """What the content of the corpus depends on besides its source."""

    val_fraction: Fraction = 0.1
    """Share of the images drawn as val if the source names no val split; copies of an image count once."""
    test_fraction: Fraction = 0.1
    """Share of the images drawn as test if the source names neither val nor test; copies of an image count once."""
    order_seed: NonNegativeInt = 0
    """Seed of the row order. Splits do not depend on it."""
    decode: DecodePolicy = DecodePolicy()
    """Size limits of images, and how to treat unusual ones."""
    duplicates: Literal["drop", "keep"] = "drop"
    """What to do with images that have the same pixels. drop: keep one of them. keep: keep all copies that are in the same
    split. An image is never in two splits, and copies do not change how likely a split is. If images can have several labels,
    the image that stays also gets the labels of its copies, with the larger weights."""
    min_images_per_class: PositiveInt = 1
    """Classes with fewer accepted images are left out."""
    val_per_class: PositiveInt | None = None
    """Number of images of every class that become val, instead of val_fraction, if the source names no val split. A class
    with fewer than twice as many images stays in train. (ImageNet-21k-P uses 50.)"""
    class_map: str = ""
    """Classes to keep, and the order of their label ids: an ImageNet release by name (imagenet21k-fall11, -google, -p ...), the
    URI of a file (a classes.json, or one source id per line), or NAME=URI for a file that must match that release.
    Empty: all classes of the source, sorted by source id."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Near duplicates within the corpus (scaled, recompressed, mirrored...): keep all, or drop all but one.
    With `add_to`, only the new images are compared with each other."""
    decontaminate: tuple[str, ...] = ()
    """Prepared corpora, NAME or NAME/VERSION. Images that equal or resemble their test and val images are left out."""
    sharding: ShardingConfig = ShardingConfig()
    known_ids: Literal["refuse", "skip"] = omitted_at_default("refuse")
    """With `add_to`, examples whose ids the corpus has already. refuse: they are an error. skip: they are left out, so that a source
    that has grown can be given again. An id stands for its first image: one that was changed since is not read again."""

    @model_validator(mode="after")
    def _train_is_left(self) -> "CorpusRecipe":
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave nothing for train; "
                "their sum must be below 1."
            )
        if self.near_duplicates == "drop" and self.duplicates == "keep":
            raise ValueError(
                "near_duplicates 'drop' with duplicates 'keep' would keep equal images and drop similar ones. "
                "Set duplicates to 'drop' as well."
            )
        return self


class PrepareExecution(FrozenConfig):
    """How the corpus is computed. It does not change the content of the corpus."""

    examples_per_chunk: PositiveInt = 512
    """Examples per task of the examine stage: the unit of restart. An archive inside the source is one task, whatever its size."""
    small_images: NonNegativeInt = 8192
    """A source of at most this many images and 1 GiB is prepared in one process, which takes less time than starting a
    cluster. If no cluster is configured, both limits are 12 times as high. 0: always use Ray."""
    sort_bytes: PositiveInt = 64 * 1024 * 1024
    """Bytes of record files that one planning task sorts, about 180 bytes per image. The task needs about 14 times as much
    memory: 0.9 GB at 64 MiB."""
    image_timeout_s: PositiveFloat = 60.0
    """Longest time for decoding one image; a slower one is refused as decoder_crash."""
    decode_memory_bytes: Annotated[int, Field(ge=1 << 30)] = 4 << 30
    """Limit of the address space of the decoding process. If that process dies, one image is refused."""
    max_refused_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of refused images with which a corpus is still published. Duplicates, and files that are not images by
    their names, do not count."""
    uncounted_losses: Literal["refuse", "accept"] = "refuse"
    """What to do if archives, files or folders cannot be read to their end, so that the number of missing images is unknown.
    refuse: publish nothing. accept: publish what was read, with a warning in the report."""


class CorpusConfig(FrozenConfig):
    """A request for one corpus."""

    name: CorpusName
    """Name of the corpus."""
    source: Source
    recipe: CorpusRecipe = CorpusRecipe()
    add_to: str = ""
    """A prepared corpus with the same name, as NAME/VERSION, to which these images are added as a new segment; its shards are
    reused unchanged. Empty: prepare a separate corpus."""
    execution: PrepareExecution = PrepareExecution()
