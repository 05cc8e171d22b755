"""Tables of image locations and labels, in every supported format."""

import csv
import gzip
import io
import json
import unicodedata
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.data_prep.archives import text_rows
from vitline.data_prep.config import CorpusRecipe, LabelTable
from vitline.data_prep.sources.label_table import LabelTableCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import StoreFailed, open_store
from vitline.infra.stores.file_store import FileStore

ROWS = [
    {
        "image": f"{'abc'[i % 3]} dir/ü{i}.jpg",
        "labels": ["cat", "dög, big"][: 1 + i % 2],
        "weights": [0.5, 1][: 1 + i % 2],
    }
    for i in range(23)
]
COLUMNS = {"weights_column": "weights", "label_separator": ";"}


def as_csv(rows, delimiter=","):
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        writer.writerow({k: ";".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return file.getvalue().encode()


def as_json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=9)
    return sink.getvalue().to_pybytes()


FORMS = {
    "t.csv": as_csv,
    "t.tsv": lambda rows: as_csv(rows, "\t"),
    "t.CSV.gz": lambda rows: gzip.compress(as_csv(rows)),
    "t.jsonl": as_json_lines,
    "t.json.gz": lambda rows: gzip.compress(as_json_lines(rows)),
    "t.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "t.parquet": as_parquet,
}


def corpus(folder, path="", **source):
    fractions = {name: source.pop(name) for name in ("val_fraction", "test_fraction") if name in source}
    return LabelTableCorpus(LabelTable(path=f"{folder.uri}/{path}".rstrip("/"), **source), CorpusRecipe(**fractions))


def read(source, examples_per_part=512):
    """All examples, checked to be unique and equal in a second listing."""
    work = open_store(f"memory://{uuid.uuid4().hex}")
    work, runs = WorkFolder(work, work, examples_per_part), []
    for _ in range(2):
        runs.append([])
        for part in source.parts(work):
            of_part = [*source.examples(type(part).model_validate_json(part.model_dump_json()), work)]
            assert part.num_examples in (0, len(of_part)) or any(example.refused for example in of_part)
            runs[-1] += of_part
    assert runs[0] == runs[1]
    assert len({example.example_id for example in runs[0]}) == len(runs[0])
    return runs[0]


def refusals(examples):
    return {e.example_id: e.refused for e in examples if e.refused}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("examples_per_part", [1, 5, 512])
def test_every_format_of_a_table_gives_the_same_examples(folder, name, examples_per_part):
    folder.write(f"tables/{name}", FORMS[name](ROWS))
    for row in ROWS:
        folder.write(f"pictures/{row['image']}", row["image"].encode())
    source = corpus(folder, "tables", images=f"{folder.uri}/pictures", **COLUMNS)
    examples = read(source, examples_per_part)
    assert [(e.example_id, list(e.labels), list(e.weights)) for e in examples] == [tuple(row.values()) for row in ROWS]
    assert {e.base for e in examples} == {f"{folder.uri}/pictures"}
    assert all(open_store(e.base).read(e.key) == e.example_id.encode() for e in examples)
    whole = read(corpus(folder, f"tables/{name}", images=f"{folder.uri}/pictures", **COLUMNS))
    assert whole == examples


def test_large_row_groups_are_read_by_several_workers(memory):
    rows = [{"image": f"{i}.jpg", "labels": i} for i in range(4000)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3000)
    memory.write("t.parquet", sink.getvalue().to_pybytes())
    source = corpus(memory)
    assert [e.labels for e in read(source, 100)] == [(f"{i:06d}",) for i in range(4000)]
    assert [part.num_examples for part in source.parts(WorkFolder(memory, memory, 100))] == [188] * 15 + [180] + [
        100
    ] * 10


text = st.text(st.sampled_from('a"b,\n\r é'), max_size=6)
csv_rows = st.lists(st.tuples(text, text), max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows=csv_rows, examples_per_part=st.integers(1, 4), end=st.sampled_from(["\n", "\r\n"]))
def test_csv_is_divided_where_rows_end_despite_quotes(rows, examples_per_part, end):
    file = io.StringIO()
    # Python's writer leaves a lone carriage return without quotes, which its reader then refuses.
    writer = csv.writer(
        file,
        lineterminator=end,
        quoting=csv.QUOTE_ALL if any("\r" in value for row in rows for value in row) else csv.QUOTE_MINIMAL,
    )
    writer.writerows([("image", "labels", "note"), *((f"{i}.jpg", f"l{a}", b) for i, (a, b) in enumerate(rows))])
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.write("t.csv", file.getvalue().encode())
    found = [(e.example_id, e.labels) for e in read(corpus(store), examples_per_part)]
    reference = csv.DictReader(io.StringIO(file.getvalue(), newline=""))
    assert found == [(row["image"], (unicodedata.normalize("NFC", row["labels"].strip()),)) for row in reference]


@settings(max_examples=60, deadline=None)
@given(body=st.lists(st.sampled_from(["a", '"', '""', ",", "\n", "\r\n"]), max_size=40))
def test_broken_quotes_do_not_depend_on_how_the_table_is_divided(body):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.write("t.csv", ("image,labels\n" + "".join(body)).encode())
    work = WorkFolder(store, store, 1), WorkFolder(store, store, 512)
    runs = [[e for part in corpus(store).parts(work) for e in corpus(store).examples(part, work)] for work in work]
    assert runs[0] == runs[1]


def test_a_bad_row_is_refused_with_its_line_and_the_rest_is_read(memory):
    lines = [
        b"\xef\xbb\xbfimage,labels,weights,split",
        b"1.jpg,a b,1 0.5,train",
        b"",
        b",a,1,",
        b"3.jpg,,,",
        b"4.jpg,a b,1,",
        b"5.jpg,a,nan,",
        b"6.jpg,a,-1,",
        b"7.jpg,a,1e39,",
        b"8.jpg,a,1,holdout",
        b"x/../../9.jpg,a,1,",
        b"a,b,c,d,e",
        b'"open,a,1,',
        b"\xff.jpg,a,1,",
        b"big.tar!member.jpg,a,1,",
        b"http://host/1.jpg,a,1,",
        b"a//b.jpg,a,1,",
        b"x" * 2000 + b",a,1,",
        b'"two\nlines.jpg",a,1,',
        b"last.jpg,a b a,0 1 0.5,VAL",
    ]
    memory.write("t.csv", b"\n".join(lines))
    columns = {"weights_column": "weights", "split_column": "split", "label_separator": " "}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "_MAX_LINE_BYTES", 1000)
        for examples_per_part in (1, 512):
            examples = read(corpus(memory, **columns), examples_per_part)
            refused = refusals(examples)
            assert [e.example_id for e in examples if not e.refused] == ["1.jpg", "two\nlines.jpg", "last.jpg"]
            assert [int(name.removeprefix("t.csv!")) for name in refused] == list(range(4, 19))
    reasons = {int(name[6:]): reason for name, (reason, _) in refused.items()}
    assert [line for line, reason in reasons.items() if reason == "no_label"] == [5, 6, 7, 8, 9]
    assert [line for line, reason in reasons.items() if reason == "unsafe_path"] == [11]
    details = " | ".join(detail for _, detail in refused.values())
    for what in (
        "line 4 of t.csv",
        "no location",
        "1 weights, but 2 labels",
        "'holdout' is not one of train",
        "5 fields",
    ):
        assert what in details
    assert "members of archives" in refused["t.csv!15"][1]
    assert "longer than 1,000 bytes" in refused["t.csv!18"][1]
    # the larger weight of a repeated label is kept
    assert (examples[-1].labels, examples[-1].weights, examples[-1].split) == (("a", "b"), (0.5, 1.0), "val")


def test_invalid_json_lines_are_refused(memory):
    lines = ['{"image": "1.jpg", "labels": [1, 2.0, "x"]}', "{", "[1]", '{"image": 7, "labels": 1}']
    lines += ['{"image": "\\ud800.jpg", "labels": 1}', '{"image": "2.jpg", "labels": ["\\ud800"]}', "[" * 100_000]
    lines += ['{"image": "3.jpg", "labels": [1.5]}', '{"image": "4.jpg", "labels": null}', '{"labels": 1}']
    memory.write("t.jsonl", "\n".join(lines).encode())
    examples = read(corpus(memory), 3)
    assert (examples[0].labels, [bool(e.refused) for e in examples]) == (
        ("000001", "000002", "x"),
        [False] + [True] * 9,
    )
    one = read(corpus(memory, single_label=True))[0]
    assert one.refused[0] == "no_label"
    assert "set source.single_label to false" in one.refused[1]


@pytest.mark.parametrize("name", ["t/t.csv", "t/t.jsonl"])
def test_whole_numbers_keep_their_order_as_in_other_kinds_of_sources(memory, name):
    labels = [0, 2, 10, 123456, "1.5", "007", "n02", "-1", "10a"]
    rows = [{"image": f"{i}.jpg", "labels": label} for i, label in enumerate(labels)]
    memory.write(name, (as_csv if name.endswith("csv") else as_json_lines)(rows))
    found = [e.labels for e in read(corpus(memory, name))]
    assert found == [(label,) for label in ("000000", "000002", "000010", "123456", "1.5", "007", "n02", "-1", "10a")]


def test_labels_are_normalised_to_what_is_read(memory):
    labels = ["1", "1.0", "01.0", "cat", "\ufeffcat", "cat\u200b\xa0", "c\u200dat"]
    lines = [f"{i}.jpg,{label}\n" for i, label in enumerate(labels)]
    memory.write("t/t.csv", ("image,labels\n" + "".join(lines[:2]) + "\ufeff" + "".join(lines[2:])).encode())
    found = [(e.key, *e.labels) for e in read(corpus(memory, "t/t.csv"))]
    expected = ["000001", "000001", "01.0", "cat", "cat", "cat", "c\u200dat"]
    assert found == [(f"{i}.jpg", label) for i, label in enumerate(expected)]


def test_whole_numbers_get_the_spelling_of_the_class_map(memory):
    memory.write("t/t.csv", as_csv([{"image": f"{i}.jpg", "labels": i} for i in (2, 10, 11)]))
    memory.write("plain.txt", b"2\n10\n")
    memory.write("filled.txt", b"000002\n000010\n")
    source = LabelTable(path=f"{memory.uri}/t/t.csv")
    for name, expected in (("plain", ["2", "10", "000011"]), ("filled", ["000002", "000010", "000011"])):
        recipe = CorpusRecipe(class_map=f"{memory.uri}/{name}.txt")
        assert [e.labels[0] for e in read(LabelTableCorpus(source, recipe))] == expected


def test_locations_are_relative_to_the_image_folder_or_absolute(memory):
    locations = ["a.jpg", "./b.jpg", "/data/c.jpg", "file:///data/d.jpg", "s3://bucket/e/f.jpg", "memory://m/g.jpg"]
    memory.write("t/t.csv", as_csv([{"image": location, "labels": "x"} for location in locations]))
    roots = ("/data", "s3://bucket/e", "memory://m")
    found = [(e.base, e.key, e.example_id) for e in read(corpus(memory, "t/t.csv", allowed_roots=roots))]
    assert found == [
        (f"{memory.uri}/t", "a.jpg", "a.jpg"),
        (f"{memory.uri}/t", "b.jpg", "./b.jpg"),
        ("file:///", "data/c.jpg", "/data/c.jpg"),
        ("file:///", "data/d.jpg", "file:///data/d.jpg"),
        ("s3://bucket", "e/f.jpg", "s3://bucket/e/f.jpg"),
        ("memory://m", "g.jpg", "memory://m/g.jpg"),
    ]


def test_locations_are_read_as_other_programs_write_them(tmp_path):
    """`Path.as_uri()`, and tables of Windows; a path that exists as it is written is that path."""
    folder = tmp_path / "my pics"
    for name in ("sub/img 0.png", "50%20.png", "a\\b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    ways = [
        (folder / "sub/img 0.png").as_uri(),
        (folder / "sub/img 0.png").as_uri().replace("///", "/"),
        f"file://{folder}/sub/img 0.png",
        r"sub\img 0.png",
        r".\sub\img 0.png",
        f"file://{folder}/50%20.png",
        r"a\b.png",
        r"C:\pics\0.png",
        r"..\my pics\sub\img 0.png",
    ]
    rows = [{"image": way, "labels": "x", "id": i} for i, way in enumerate(ways)]
    (folder / "t.csv").write_bytes(as_csv(rows))
    found = read(LabelTableCorpus(LabelTable(path=str(folder / "t.csv"), id_column="id"), CorpusRecipe()))
    assert [open_store(e.base).read(e.key) for e in found[:7]] == [*[b"sub/img 0.png"] * 5, b"50%20.png", b"a\\b.png"]
    assert "a path on a drive of Windows" in found[7].refused[1]
    assert found[8].refused[0] == "unsafe_path"


def test_a_json_array_is_read_up_to_its_damage(memory):
    rows = [{"image": f"{i}.jpg", "labels": "x" * (i * 9000)} for i in range(1, 23)]
    whole = json.dumps(rows).encode()
    endings = {
        b"]": None,
        b"": "the array has no end",
        b"]]": "stands behind the array",
        b", 1]": "element 23 of t.json: 1 is not a JSON object",
        b", ]": "a comma stands before the end",
        b" {": "stands behind an element",
        b", {": "an element is not JSON",
    }
    for end, said in endings.items():
        memory.write("t.json", whole[:-1] + end)
        found = read(corpus(memory))
        assert [e.key for e in found if not e.refused] == [row["image"] for row in rows]
        assert (found[-1].refused is None) if said is None else said in found[-1].refused[1]


@pytest.mark.parametrize("name", FORMS)
def test_splits_ids_and_groups_are_read_and_missing_splits_are_drawn(memory, name):
    rows = [
        {"image": f"{i}.jpg", "labels": "x", "split": "training", "key": i, "group": str(i // 100)} for i in range(300)
    ]
    rows[7]["split"] = "testing"
    rows[8]["split"] = ""
    columns = {"split_column": "split", "id_column": "key", "group_column": "group", "val_fraction": 0.4}
    memory.write(name, FORMS[name](rows))
    examples = read(corpus(memory, **columns))
    assert [e.example_id for e in examples] == [str(i) for i in range(300)]
    assert examples[7].split == "test"
    of_groups = {(e.group, e.split) for e in examples if e.example_id != "7"}
    assert len(of_groups) == 3  # groups are not divided
    assert {e.split for e in examples} == {"train", "val", "test"}
    rows[299]["split"] = "valid"
    memory.write(name, FORMS[name](rows))
    assert [e.example_id for e in read(corpus(memory, **columns)) if e.split == "val"] == ["299"]


def test_damaged_tables_lose_only_unreadable_rows(memory):
    memory.write("whole/a.csv.gz", gzip.compress(as_csv(ROWS * 40), 0)[:20_000])
    memory.write("whole/b.csv.gz", b"no gzip")
    memory.write("short/b.jsonl.gz", gzip.compress(as_json_lines(ROWS), 0)[:300])
    memory.write("whole/c.csv", b"")
    memory.write("whole/d.csv", as_csv([{"image": "d.jpg", "labels": "x", "weights": 1}]))
    work = WorkFolder(memory, memory, 512)
    source = corpus(memory, "whole", **COLUMNS)
    examples = [example for part in source.parts(work) for example in source.examples(part, work)]
    refused = refusals(examples)
    assert {name: reason for name, (reason, _) in refused.items()} == {
        "a.csv.gz!damaged": "uncounted_loss",
        "b.csv.gz.damaged!damaged": "uncounted_loss",
        "c.csv.damaged!damaged": "unreadable",
    }
    assert examples[-1].example_id == "d.jpg"
    assert len(examples) > 100
    short = corpus(memory, "short", **COLUMNS)
    assert [bool(e.refused) for part in short.parts(work) for e in short.examples(part, work)] == [
        False,
        False,
        False,
        True,
    ]


def test_a_failing_store_is_not_reported_as_a_damaged_table(tmp_path, monkeypatch):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(as_csv(ROWS)))

    class Failing(io.BytesIO):
        def readinto(self, buffer):
            raise StoreFailed("503")

    monkeypatch.setattr(FileStore, "open", lambda self, key: Failing(b"x" * 100))
    with pytest.raises(StoreFailed, match="503"):
        read(LabelTableCorpus(LabelTable(path=str(tmp_path)), CorpusRecipe()))


@pytest.mark.parametrize("name", FORMS)
def test_a_missing_column_is_an_error_that_lists_the_columns(memory, name):
    memory.write(name, FORMS[name](ROWS))
    with pytest.raises(ValueError, match=r"has no column 'split'; its columns are image, labels, weights"):
        read(corpus(memory, split_column="split"))


def test_tables_of_two_kinds_or_no_table_are_an_error(memory):
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        corpus(memory).fingerprint()
    memory.write("a.csv", as_csv(ROWS))
    before = corpus(memory).fingerprint()
    memory.write("b.jsonl", as_json_lines(ROWS))
    assert corpus(memory).fingerprint() != before
    with pytest.raises(ValueError, match=r"a\.csv is CSV, b\.jsonl is JSON lines"):
        read(corpus(memory))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("img/./x.jpg", "the path has a folder '.'; write it as 'img/x.jpg'"),
        ("img//x.jpg", "the path has a double or trailing slash"),
        ("img/", "the path has a double or trailing slash"),
        ("s3:///x.jpg", "is not a valid bucket name; expected s3://bucket/path"),
    ],
)
def test_invalid_location_is_refused_with_a_message_about_the_location(memory, location, message):
    memory.write("t.csv", as_csv([{"image": location, "labels": "x"}]))
    (refused,) = refusals(read(corpus(memory))).values()
    assert refused[0] == "unreadable"
    assert message in refused[1]
    assert "is not a valid key" not in refused[1]
