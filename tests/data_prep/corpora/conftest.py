"""Helpers for the tests of all sources: reading everything as preparation does, tasks as corpora, and the archives of
ILSVRC2012."""

import io
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, ShardingConfig
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import open_store

from ...tars import tar_of


@pytest.fixture
def read():
    """read(source, examples_per_part): id, labels, weights, group, split, bytes, refusal and key of every example; checked
    against its locator when its part was exhausted, and against a second listing."""

    def read_twice(source, examples_per_part=512):
        runs = []
        for _ in range(2):
            work = open_store(f"memory://{uuid.uuid4().hex}")
            work, found = WorkFolder(work, work, examples_per_part), []
            for part in source.parts(work):
                of_part = [*source.examples(SourcePart.model_validate_json(part.model_dump_json()), work)]
                for example in of_part:
                    if not example.refused:
                        end = example.offset + example.length
                        assert open_store(example.base).read(example.key, example.offset, end) == example.data
                assert part.num_examples in (0, len(of_part)) or any(example.refused for example in of_part)
                found += [
                    (e.example_id, e.labels, e.weights, e.group, e.split, e.data, e.refused, e.key) for e in of_part
                ]
            runs.append(found)
        assert runs[0] == runs[1]
        assert len({row[0] for row in runs[0]}) == len(runs[0])
        return runs[0]

    return read_twice


@pytest.fixture
def prepared(tmp_path, task_source):
    """prepared(task, folder): manifest, store, and (example id, label, image) of every split in order; a list of labels if an
    image may have several. `task_source` is that of the folder of the test: `Vtab` or `Transfer`."""

    def prepare_task(task, folder, min_row_groups=4):
        # By default a small corpus has a row group per row, which costs most of the time of a test that reads all of them.
        root = str(tmp_path / "prepared")
        recipe = CorpusRecipe(sharding=ShardingConfig(min_row_groups=min_row_groups))
        source = task_source(task=task, path=str(folder))
        (manifest,) = prepare([CorpusConfig(name=task, source=source, recipe=recipe)], root)
        corpus = open_store(f"{root}/corpora/{manifest.name}/{manifest.version}")
        label, rows = "label" if manifest.single_label else "labels", {}
        for split in manifest.splits:
            with ShardReader(corpus, manifest, split) as reader:
                tables = [reader.row_group(i) for i in range(reader.split.num_row_groups)]
            rows[split] = [
                (row["example_id"], row[label], row["image"]["bytes"]) for table in tables for row in table.to_pylist()
            ]
        return manifest, corpus, rows

    return prepare_task


def meta(synsets, compressed=True):
    """meta.mat, as scipy writes it, of (number, WNID, words, numbers of children)."""
    names = (
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    )
    rows = np.zeros((len(synsets), 1), dtype=[(name, "O") for name in names])
    for row, (number, wnid, words, children) in zip(rows[:, 0], synsets, strict=True):
        numbers = np.array([children], np.float64).reshape(1, -1)
        values = (float(number), wnid, words, "a gloss", len(children), numbers, 1, 2)
        for name, value in zip(names, values, strict=True):
            row[name] = value
    out = io.BytesIO()
    scipy.io.savemat(out, {"synsets": rows}, do_compression=compressed)
    return out.getvalue()


def kit_of(synsets, numbers, *, meta=None, truth=None):
    """The development kit: `numbers` are the labels of the validation images in turn. `meta` and `truth` replace files."""
    files = {
        "readme.txt": b"x",
        "data/meta.mat": meta or ILSVRC.meta(synsets),
        "data/ILSVRC2012_validation_ground_truth.txt": truth or "".join(f"{number}\n" for number in numbers).encode(),
    }
    return tar_of({f"ILSVRC2012_devkit_t12/{name}": data for name, data in files.items()}, "w:gz")


ILSVRC = SimpleNamespace(tar_of=tar_of, meta=meta, kit=kit_of)


@pytest.fixture(scope="session")
def ilsvrc():
    """Writes the archives of ILSVRC2012 in miniature."""
    return ILSVRC
