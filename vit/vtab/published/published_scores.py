"""Published scores as data: every row of the papers that a score of ours is put beside, with its source.

Tables are kept as they are printed, in percent and with their own order of columns, and read once. Sources: ViT,
arXiv:2010.11929 (version 2 unless a row says v1); BiT, arXiv:1912.11370, and the re-runs in its repository's README;
VTAB, google-research/task_adaptation, docs/data/results.csv; "Better plain ViT", arXiv:2205.01580.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType

VIT, BIT = "arXiv:2010.11929", "arXiv:1912.11370"
SHORT_NAMES = {"JFT-300M": "JFT", "ImageNet-21k": "I21k", "ImageNet": "ImageNet"}
"""Pre-training data as labels spell it."""
GROUP_COLUMNS = ("natural", "specialized", "structured", "all")
"""Columns of a printed mean; any other column is the corpus of a task."""


@dataclass(frozen=True)
class PublishedRow:
    """A model's scores as printed, as fractions by corpus name; a task that is not printed is absent."""

    model: str
    """As its table calls it, as in ViT-L/16."""
    data: str | None
    """What it was pre-trained on; None: nothing."""
    source: str
    """Paper, version and table."""
    setting: str = ""
    """What tells it from other rows of the same model and data."""
    scores: Mapping[str, float] = field(default_factory=dict)
    deviations: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation over the authors' runs, by corpus or group, where it is printed."""
    printed_means: Mapping[str, float] = field(default_factory=dict)
    """Means over VTAB's groups and over `all` 19, where the source prints them."""
    tpuv3_core_days: float | None = None
    exaflops: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """`ViT-L/16 (I21k), 384 px`: unique among the rows."""
        data = f" ({SHORT_NAMES[self.data]})" if self.data else ""
        return f"{self.model}{data}{f', {self.setting}' if self.setting else ''}"

    @property
    def architecture(self) -> str | None:
        """As `vit.models.variants.spelled` writes it; None for networks that are not among ours."""
        if re.fullmatch(r"(R50x1\+)?ViT-./\d+", self.model):
            return self.model.replace("R50x1+", "R50+")
        resnet = re.fullmatch(r"(?:ResNet|BiT-[SML] R)(\d+x\d)", self.model)
        return f"BiT-R{resnet[1]}" if resnet else None

    @property
    def is_headline(self) -> bool:
        """Whether it is of the paper's Tables 2 and 9, or of BiT's re-runs: the rows that people quote."""
        table_2 = self.source.startswith(f"{VIT}v2, Table") and not self.setting
        return table_2 or self.setting == "re-run"

    @property
    def is_v1(self) -> bool:
        return "v1" in self.source


# Columns of Tables 2 and 9; the first three have both.
_H14_JFT, _L16_JFT, _L16_I21K = ("ViT-H/14", "JFT-300M"), ("ViT-L/16", "JFT-300M"), ("ViT-L/16", "ImageNet-21k")
_BIT_L, _NOISY = ("BiT-L R152x4", "JFT-300M"), ("Noisy Student EfficientNet-L2", "JFT-300M")
_NOTES = {_NOISY[0]: "ImageNet is printed as 88.4 / 88.5"}

_TABLE_2 = """
imagenet         88.55±0.04  87.76±0.03  85.30±0.02  87.54±0.02  88.4
imagenet-real    90.72±0.05  90.54±0.03  88.62±0.05  90.54       90.55
cifar10          99.50±0.06  99.42±0.03  99.15±0.03  99.37±0.06  -
cifar100         94.55±0.04  93.90±0.05  93.25±0.05  93.51±0.08  -
pets             97.56±0.03  97.32±0.11  94.67±0.15  96.62±0.23  -
flowers102       99.68±0.02  99.74±0.00  99.61±0.02  99.63±0.03  -
all              77.63±0.23  76.28±0.46  72.72±0.21  76.29±1.70  -
tpuv3_core_days  2500        680         230         9900        12300
"""
_TABLE_9 = """
vtab-caltech101            95.3  95.4  90.8
vtab-cifar100              85.5  81.9  84.1
vtab-dtd                   75.2  74.3  74.1
vtab-flowers102            99.7  99.7  99.3
vtab-pets                  97.2  96.7  92.7
vtab-sun397                65.0  63.5  61.0
vtab-svhn                  88.9  87.4  80.9
vtab-patch-camelyon        83.3  83.6  82.5
vtab-eurosat               96.7  96.5  95.6
vtab-resisc45              91.4  89.7  85.2
vtab-diabetic-retinopathy  76.6  77.1  75.3
vtab-clevr-count           91.7  86.4  70.3
vtab-clevr-distance        63.8  63.1  56.1
vtab-dmlab                 53.1  49.7  41.9
vtab-dsprites-location     79.4  74.5  74.7
vtab-dsprites-orientation  63.3  60.5  64.9
vtab-kitti-distance        84.5  82.2  79.9
vtab-smallnorb-azimuth     33.2  36.2  30.5
vtab-smallnorb-elevation   51.2  51.1  41.7
"""
_TABLE_2_V1 = """
imagenet         88.36       87.61±0.03  87.54±0.02  88.4
imagenet-real    90.77       90.24±0.03  90.54       90.55
cifar10          99.50±0.06  99.42±0.03  99.37±0.06  -
cifar100         94.55±0.04  93.90±0.05  93.51±0.08  -
pets             97.56±0.03  97.32±0.11  96.62±0.23  -
flowers102       99.68±0.02  99.74±0.00  99.63±0.03  -
all              77.16±0.29  75.91±0.18  76.29±1.70  -
tpuv3_core_days  2500        680         9900        12300
"""
_TABLE_5_MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")
_TABLE_5 = {
    "ImageNet": """
cifar10        98.13  97.77  97.86  97.94  -
cifar100       87.13  86.31  86.35  87.07  -
imagenet       77.91  73.38  76.53  71.16  -
imagenet-real  83.57  79.56  82.19  77.83  -
flowers102     89.49  85.43  89.66  86.36  -
pets           93.81  92.04  93.64  91.35  -
""",
    "ImageNet-21k": """
cifar10        98.95  98.79  99.16  99.13  99.27
cifar100       91.67  91.97  93.44  93.04  93.82
imagenet       83.97  81.28  85.15  80.99  85.13
imagenet-real  88.35  86.63  88.40  85.65  88.70
flowers102     99.38  99.11  99.61  99.19  99.51
pets           94.43  93.02  94.73  93.09  94.82
""",
    "JFT-300M": """
cifar10        99.00  98.61  99.38  99.19  99.50
cifar100       91.87  90.49  94.04  92.52  94.55
imagenet       84.15  80.73  87.12  84.37  88.04
imagenet-real  88.85  86.27  89.99  88.28  90.33
flowers102     99.56  99.27  99.56  99.45  99.68
pets           95.80  93.40  97.11  95.83  97.56
""",
}
_TABLE_5_V1 = {
    "ImageNet": _TABLE_5["ImageNet"],  # printed alike in both versions
    "ImageNet-21k": """
cifar10        98.95  98.79  98.97  99.13  -
cifar100       91.67  91.97  91.73  93.04  -
imagenet       83.97  81.28  79.45  80.99  -
imagenet-real  88.35  86.63  83.38  85.65  -
flowers102     99.38  99.11  99.09  99.19  -
pets           94.43  93.02  93.18  93.09  -
""",
    "JFT-300M": """
cifar10        99.00  98.61  99.42  99.19  99.50
cifar100       91.87  90.49  93.90  92.52  94.55
imagenet       84.15  80.73  87.61  84.37  88.36
imagenet-real  88.85  86.27  90.24  88.28  90.77
flowers102     99.56  99.27  99.74  99.45  99.68
pets           95.80  93.40  97.32  95.83  97.56
""",
}
_TABLE_6_COLUMNS = "epochs imagenet imagenet-real cifar10 cifar100 pets flowers102 exaflops"
_TABLE_6 = """
ViT-B/32        7   80.73  86.27  98.61  90.49  93.40  99.27  55
ViT-B/16        7   84.15  88.85  99.00  91.87  95.80  99.56  224
ViT-L/32        7   84.37  88.28  99.19  92.52  95.83  99.45  196
ViT-L/16        7   86.30  89.43  99.38  93.46  96.81  99.66  783
ViT-L/16        14  87.12  89.99  99.38  94.04  97.11  99.56  1567
ViT-H/14        14  88.08  90.36  99.50  94.71  97.11  99.71  4262
ResNet50x1      7   77.54  84.56  97.67  86.07  91.11  94.26  50
ResNet50x2      7   82.12  87.94  98.29  89.20  93.43  97.02  199
ResNet101x1     7   80.67  87.07  98.48  89.17  94.08  95.95  96
ResNet152x1     7   81.88  87.96  98.82  90.22  94.17  96.94  141
ResNet152x2     7   84.97  89.69  99.06  92.05  95.37  98.62  563
ResNet152x2     14  85.56  89.89  99.24  91.92  95.75  98.75  1126
ResNet200x3     14  87.22  90.15  99.34  93.53  96.32  99.04  3306
R50x1+ViT-B/32  7   84.90  89.15  99.01  92.24  95.75  99.46  106
R50x1+ViT-B/16  7   85.58  89.65  99.14  92.63  96.65  99.40  274
R50x1+ViT-L/32  7   85.68  89.04  99.24  92.93  96.97  99.43  246
R50x1+ViT-L/16  7   86.60  89.72  99.18  93.64  97.03  99.40  859
R50x1+ViT-L/16  14  87.12  89.76  99.31  93.89  97.36  99.11  1668
"""
_BIT_TABLE_2_COLUMNS = "data imagenet cifar10 cifar100 pets flowers102 all"
_BIT_TABLE_2 = """
BiT-S  ImageNet      81.30  97.51  86.21  93.97  89.89  66.87
BiT-M  ImageNet-21k  85.39  98.91  92.17  94.46  99.30  70.64
BiT-L  JFT-300M      87.54  99.37  93.51  96.62  99.63  76.29
"""
_BIT_RERUNS_COLUMNS = "all natural specialized structured"
_BIT_RERUNS = """
R152x4  73.51  80.77  85.67  61.08
R101x3  72.65  80.29  85.75  59.40
"""
# VTAB's own order differs from Table 9's: SVHN before Sun397, and KITTI before the dSprites.
_VTAB_COLUMNS = """vtab-caltech101 vtab-cifar100 vtab-dtd vtab-flowers102 vtab-pets vtab-svhn vtab-sun397
vtab-patch-camelyon vtab-eurosat vtab-resisc45 vtab-diabetic-retinopathy
vtab-clevr-count vtab-clevr-distance vtab-dmlab vtab-kitti-distance vtab-dsprites-location vtab-dsprites-orientation
vtab-smallnorb-azimuth vtab-smallnorb-elevation all"""
_VTAB_RESNET50 = """
From-Scratch          38.2 13.2 20.6 40.2 12.1 66.1  5.0  75.6 85.0 42.6 72.6  38.8 55.2 26.6 42.7 78.4 39.2 30.1 37.6  43.14
Rotation              77.6 27.3 51.4 68.8 48.3 89.4 12.9  80.4 93.5 69.4 70.9  45.6 60.9 40.4 75.9 89.6 49.5 52.2 44.3  60.45
Sup-100%              91.0 57.0 66.0 88.6 89.9 87.3 34.4  80.6 95.3 80.8 73.2  41.0 56.1 36.3 70.6 85.7 46.0 45.7 35.4  66.37
Sup-Exemplar-100%     90.2 56.7 67.3 88.3 89.7 88.9 34.5  83.7 95.7 80.5 72.4  37.8 56.0 37.8 77.7 84.3 53.9 49.6 40.5  67.67
Sup-Rotation-100%     91.7 53.7 69.5 90.8 88.1 88.5 32.8  83.4 96.0 82.0 71.1  47.3 57.2 36.6 77.1 88.3 52.1 51.6 33.7  67.97
"""
# Of the ViT repository's README: single runs; without dropout on A100, with dropout 0.1 on V100.
_VIT_RERUNS_COLUMNS = "cifar10 cifar100 imagenet"
_VIT_RERUNS = {
    "dropout 0.0": """
R50x1+ViT-B/16  98.72  90.88  83.72
ViT-B/16        99.02  92.06  84.53
ViT-B/32        98.88  92.31  81.66
ViT-L/16        99.13  92.91  84.47
ViT-L/32        99.06  93.29  81.89
""",
    "dropout 0.1": """
R50x1+ViT-B/16  98.94  92.30  85.08
ViT-B/16        98.76  91.92  84.12
ViT-B/32        98.75  92.05  81.31
ViT-L/16        99.14  93.22  85.05
ViT-L/32        99.09  93.34  81.13
""",
}
_PLAIN_VIT_COLUMNS = "imagenet imagenet-real imagenet-v2"
_PLAIN_VIT = """
90 epochs of the original recipe  66.8  72.8  52.2
plain, 90 epochs                  76.5  83.1  64.2
plain, 150 epochs                 78.5  84.5  66.4
plain, 300 epochs                 80.0  85.4  68.3
"""


def _cell(text: str) -> tuple[float | None, float | None]:
    """`88.55±0.04` -> (88.55, 0.04); `-` is nothing."""
    value, _, deviation = text.partition("±")
    return (None if value == "-" else float(value)), (float(deviation) if deviation else None)


def _fraction(percent: float) -> float:
    """What is printed has at most two decimals; the fraction has four, without the dust of a division."""
    return round(percent / 100, 6)


def _row(
    model: str, data: str | None, source: str, cells: Mapping[str, str], setting: str = "", note: str = ""
) -> PublishedRow:
    """A row from its printed cells: by corpus, by group, or a cost. A column without an entry is left out."""
    read = {column: _cell(text) for column, text in cells.items()}
    values = {column: value for column, (value, _) in read.items() if value is not None}
    days, exaflops = values.pop("tpuv3_core_days", None), values.pop("exaflops", None)
    means = {name: _fraction(values.pop(name)) for name in GROUP_COLUMNS if name in values}
    return PublishedRow(
        model=model,
        data=data,
        source=source,
        setting=setting,
        scores=MappingProxyType({name: _fraction(value) for name, value in values.items()}),
        deviations=MappingProxyType({name: _fraction(d) for name, (_, d) in read.items() if d is not None}),
        printed_means=MappingProxyType(means),
        tpuv3_core_days=days,
        exaflops=exaflops,
        note=note,
    )


def _by_column(text: str) -> Iterator[dict[str, str]]:
    """The models of a table in which each has a column: its cells by the name that begins a line."""
    names, *models = zip(*map(str.split, text.strip().splitlines()), strict=True)
    for cells in models:
        yield dict(zip(names, cells, strict=True))


def _by_row(columns: str, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The models of a table in which each has a line: what begins it, and its cells by column."""
    names = columns.split()
    for line in text.strip().splitlines():
        words = line.split()
        label, cells = words[: -len(names)], words[-len(names) :]
        yield " ".join(label), dict(zip(names, cells, strict=True))


def _rows_of_the_paper() -> Iterator[PublishedRow]:
    """Tables 2 and 9 in one, then 5 and 6, of version 2; Tables 2 and 5 of version 1."""
    table_9 = (*_by_column(_TABLE_9), {}, {})
    models = (_H14_JFT, _L16_JFT, _L16_I21K, _BIT_L, _NOISY)
    for (model, data), cells, vtab in zip(models, _by_column(_TABLE_2), table_9, strict=True):
        tables = "Tables 2 and 9" if vtab else "Table 2"
        yield _row(model, data, f"{VIT}v2, {tables}", cells | vtab, note=_NOTES.get(model, ""))
    yield from _rows_of_table_5("v2", _TABLE_5, "384 px")
    for model, cells in _by_row(_TABLE_6_COLUMNS, _TABLE_6):
        setting = f"{cells.pop('epochs')} epochs"
        yield _row(model, "JFT-300M", f"{VIT}v2, Table 6", cells, setting)
    for (model, data), cells in zip((_H14_JFT, _L16_JFT, _BIT_L, _NOISY), _by_column(_TABLE_2_V1), strict=True):
        yield _row(model, data, f"{VIT}v1, Table 2", cells, "v1", note=_NOTES.get(model, ""))
    yield from _rows_of_table_5("v1", _TABLE_5_V1, "Table 5 of v1")


def _rows_of_table_5(version: str, tables: Mapping[str, str], setting: str) -> Iterator[PublishedRow]:
    """A row for each network and pre-training data; a network that was not trained on these has none."""
    for data, text in tables.items():
        for model, cells in zip(_TABLE_5_MODELS, _by_column(text), strict=True):
            if set(cells.values()) != {"-"}:
                yield _row(model, data, f"{VIT}{version}, Table 5", cells, setting)


def _rows_of_others() -> Iterator[PublishedRow]:
    """BiT's own table and re-runs, VTAB's ResNet-50, the authors' re-runs of ViT, plain ViT."""
    for model, cells in _by_row(_BIT_TABLE_2_COLUMNS, _BIT_TABLE_2):
        yield _row(f"{model} R152x4", cells.pop("data"), f"{BIT}, Table 2", cells, setting="BiT's paper")
    for model, cells in _by_row(_BIT_RERUNS_COLUMNS, _BIT_RERUNS):
        source = "google-research/big_transfer, README"
        yield _row(f"BiT-M {model}", "ImageNet-21k", source, cells, setting="re-run")
    for method, cells in _by_row(_VTAB_COLUMNS, _VTAB_RESNET50):
        source = "google-research/task_adaptation, docs/data/results.csv, 1,000 examples"
        data = None if method == "From-Scratch" else "ImageNet"
        yield _row(f"ResNet-50 {method}", data, source, cells)
    for dropout, text in _VIT_RERUNS.items():
        for model, cells in _by_row(_VIT_RERUNS_COLUMNS, text):
            source = "google-research/vision_transformer, README, single runs"
            yield _row(model, "ImageNet-21k", source, cells, setting=f"re-run, {dropout}")
    for recipe, cells in _by_row(_PLAIN_VIT_COLUMNS, _PLAIN_VIT):
        yield _row("ViT-S/16", "ImageNet", "arXiv:2205.01580, 224 px", cells, setting=recipe)


ROWS: Mapping[str, PublishedRow] = MappingProxyType(
    {row.label: row for row in (*_rows_of_the_paper(), *_rows_of_others())}
)
"""Every row by its label, in the order of the tables."""


def published_named(label: str) -> PublishedRow:
    """The row of this label. Raises ValueError that names the labels it may have meant."""
    if label in ROWS:
        return ROWS[label]
    near = get_close_matches(label, ROWS, n=4, cutoff=0.3) or list(ROWS)[:5]
    raise ValueError(
        f"There is no published row {label!r}; near it are: {'; '.join(near)}. `vitline vtab report --json` lists all "
        f"{len(ROWS)}."
    )
