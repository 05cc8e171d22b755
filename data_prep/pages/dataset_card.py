"""README.md of a corpus: a dataset card for readers and for Hugging Face `datasets`. It names the shards of each split, so that
`datasets.load_dataset(<folder of the corpus>)` ignores the other tables of the folder, and it names the classes.

Class names are here and not in the Parquet schema: 21,843 names would add 1 MB to the footer of every shard, and a segment may
add classes while the existing shards stay unchanged.
"""

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.shard_format import Manifest, SplitInfo

_LABELS = ("label", "labels")


def dataset_card(manifest: Manifest, class_map: ClassMap) -> str:
    """A dataset card: YAML with the files of every split and the type of every column, then text. Splits that join others,
    such as trainval, are left out, because their rows would appear twice."""
    splits = manifest.own_splits
    classes = "class" if manifest.num_classes == 1 else "classes"
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        *(line for name, split in splits.items() for line in _data_files(name, split)),
        "dataset_info:",
        "  features:",
        *(f"  {line}" for field in manifest.arrow_schema() for line in _feature(field, _class_names(class_map))),
        "---",
        f"# {manifest.name}/{manifest.version}",
        "",
        f"{manifest.counts.num_accepted:,} labelled images of {manifest.num_classes:,} {classes}, written by vitline: "
        + ", ".join(f"{name} {split.num_rows:,}" for name, split in splits.items())
        + ".",
        "",
        f"Origin: `{manifest.provenance['origin']}`. {manifest.provenance['credit']}".rstrip(),
        "",
        '    datasets.load_dataset("<this folder>")',
        "",
        "`image` holds the original files. `manifest.json` describes the corpus; `report.html`, `stats.json`, "
        "`rejects.parquet` and `leakage.parquet` show its contents, and what was refused and why.",
        "",
    ]
    return "\n".join(lines)


def _data_files(name: str, split: SplitInfo) -> Iterator[str]:
    yield f"  - split: {name}"
    yield "    path:"
    for part in split.segments:
        folder = f"../{part.version}/" if part.version else ""
        yield f"    - {_quoted(f'{folder}{part.split}/{part.name}/*.parquet')}"


def _feature(field: pa.Field, names: list[str]) -> Iterator[str]:
    yield f"- name: {field.name}"
    is_list = pa.types.is_list(field.type)
    if field.name in _LABELS:
        yield "  list:" if is_list else "  dtype:"
        yield "    class_label:"
        yield "      names:"
        yield from (f"        '{i}': {_quoted(name)}" for i, name in enumerate(names))
    elif is_list:
        yield f"  list: {_dtype(field.type.value_type)}"
    else:
        yield f"  dtype: {'image' if field.name == 'image' else _dtype(field.type)}"


def _dtype(kind: pa.DataType) -> str:
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _class_names(class_map: ClassMap) -> list[str]:
    """Names by label id. `datasets` requires distinct names, so classes with equal names get their source ids appended."""
    times = Counter(info.name for info in class_map.classes)
    return [info.name if times[info.name] == 1 else f"{info.name} ({info.source_id})" for info in class_map.classes]


def _quoted(text: str) -> str:
    """A YAML string in double quotes."""
    shown = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(shown)}"'
