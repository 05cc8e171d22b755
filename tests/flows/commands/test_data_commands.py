"""`vitline data` on real small corpora, prepared in this process: what people see of them, and what they are warned of."""

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from data_prep.corpus_stats import Findings, Leak
from data_prep.find_corpus import corpus_store
from data_prep.prepare import PrepareSpec, prepare
from data_prep.progress import Progress, preparation_progress, remaining_s
from flows.commands.data_commands import number_of
from flows.console import line
from flows.deployed import corpus_links
from flows.stages.prepare_corpus import PreparedCorpus, leak_lines, source_request
from flows.to_mlflow.stage_snapshots import stage_snapshot
from infra.runs.run_state import write_state
from infra.storage import open_store


def picture(seed):
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((40, 32), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of pictures: `birds`, 30 for training and 10 for validation; `pets`, whose test split has two of them."""
    place = tmp_path_factory.mktemp("data")
    for i in range(30):
        fill(place / "birds/train" / ("owl", "wren")[i % 2] / f"{i}.png", picture(i))
    for i in range(10):
        fill(place / "birds/val/owl" / f"v{i}.png", picture(100 + i))
        fill(place / "pets/train/cat" / f"{i}.png", picture(200 + i))
    for i in range(4):
        fill(place / "pets/test/cat" / f"t{i}.png", picture(i if i < 2 else 300 + i))
    (place / "birds/train/owl/broken.png").write_bytes(b"no picture")
    return place


def fill(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def corpora(place):
    """A root with both corpora, and `birds` without what it shares with `pets`; their stores by name."""
    root = str(place / "store")
    made = {}
    for name, source, more in (
        ("pets", "pets", {}),
        ("birds", "birds", {}),
        ("clean", "birds", {"decontaminate": ("pets",)}),
    ):
        request = source_request(root, str(place / source), name, **more)
        prepare([request], root)
        made[name] = corpus_store(open_store(root), request)
    return root, made


@pytest.fixture
def data(vitline, corpora, tmp_path, monkeypatch):
    """data(*arguments): the output of `vitline data` below the root with the corpora, which has to succeed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, err=False):
        code, out, said = vitline("data", *arguments, "--root", corpora[0])
        assert code == 0, said
        return (out, said) if err else out

    return call


LEAK = "2 training images match the test split of pets; leave them out with --decontaminate pets (before training)"


def test_a_finished_corpus_is_found_without_a_cluster_and_warns_of_leakage(data, place):
    prep = ("prep", "--source", place / "birds", "--name", "birds")
    out, err = data(*prep, err=True)
    assert f"warning: birds: {LEAK}" in err
    shown = " ".join(out.split())
    assert "leakage 2 training images match" in shown
    assert "(reused)" in shown
    assert "not_an_image 1" in shown
    prep = ("prep", "--source", place / "birds", "--name", "clean", "--decontaminate", "pets")
    out, err = data(*prep, "--take", "20", err=True)
    assert "warning" not in err
    assert "refused leakage 2, not_an_image 1 leakage none; compared with " in " ".join(out.split())
    assert "the first 20 of train of clean/" in out
    taken = json.loads(data(*prep, "--take", "20", "--json"))
    (view,) = taken["views"]
    assert view["splits"]["train"]["num_rows"] == 20
    assert view["provenance"]["view_of"]["version"] == taken["corpora"][0]["version"]


def test_a_view_is_named_by_its_version_and_never_stands_for_its_corpus(data, corpora):
    version = corpora[1]["birds"].uri.rpartition("/")[2]
    view = json.loads(data("take", "birds", "0.01k", "--json"))
    assert json.loads(data("take", "birds", "10", "--json")) == view
    assert json.loads(data("show", "birds", "--json"))["version"] == version
    shown = json.loads(data("show", f"birds/{view['version']}", "--json"))
    assert (shown["made_of"], shown["segments"]) == (f"first 10 of train of {version}", 1)
    listed = {row["version"]: row for row in json.loads(data("ls", "--json"))["corpora"] if row["name"] == "birds"}
    assert listed[view["version"]]["view_of"]["take"] == 10
    assert listed[view["version"]]["splits"] == {"train": 10, "val": 10}
    assert listed[version]["view_of"] is None
    out, err = data("stats", f"birds/{view['version']}", err=True)
    assert f"is a view: these are the statistics of birds/{version}" in err
    assert "30 images" in out


def test_nothing_is_added_to_a_view(data, refused, corpora, place):
    """Refused at once, with the corpus to add to, and without a trace in the store."""
    root, whole = corpora[0], corpora[1]["birds"].uri.rpartition("/")[2]
    version = json.loads(data("take", "birds", "12", "--json"))["version"]
    inner = json.loads(data("take", f"birds/{version}", "7", "--json"))["version"]
    before = open_store(root).list()
    for view in (version, inner):
        prep = ("data", "prep", "--source", place / "pets", "--add-to", f"birds/{view}", "--root", root)
        for dry in ((), ("--dry-run",)):
            assert f"Add to birds/{whole}." in refused(*prep, *dry)
    assert open_store(root).list() == before


def test_verify_says_what_is_whole_and_what_is_missing_beside_it(data, corpora, vitline):
    root, made = corpora
    view = json.loads(data("take", "birds", "7", "--json"))
    shown = " ".join(data("verify", f"birds/{view['version']}").split())
    assert "rows, of which this view shows 17, are as written" in shown
    assert data("verify", "birds").endswith("rows are as written.\n")
    assert data("verify", "birds", "--pixels").endswith("rows are as written, and every picture is whole.\n")
    report = made["birds"].read("report.html")
    made["birds"].delete("report.html")
    code, out, err = vitline("data", "verify", "birds", "--root", root)
    made["birds"].write("report.html", report)
    assert code == 1
    assert "report.html is missing" in out
    assert "can be trained on" in err


def test_a_view_on_part_of_a_test_split_keeps_nothing_less_out(data, corpora, place):
    root, made = corpora
    data("take", "pets", "1", "--split", "test")
    request = source_request(root, str(place / "birds"), "clean", decontaminate=("pets",))
    assert corpus_store(open_store(root), request) == made["clean"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1000", 1000), ("1,000", 1000), ("50k", 50_000), ("30M", 30_000_000), ("1.5G", 1_500_000_000), ("0.001k", 1)],
)
def test_numbers_of_rows_are_read_as_people_write_them(text, number):
    assert number_of(text) == number


@pytest.mark.parametrize("text", ["", "M", "0", "-3", "1.5", "30X", "nan", "1e400"])
def test_what_is_no_number_of_rows_is_refused(refused, corpora, text):
    assert "is no number of rows" in refused("data", "take", "birds", "--root", corpora[0], "--", text)


def test_a_view_as_large_as_its_corpus_is_refused(refused, corpora):
    assert "train of birds/" in refused("data", "take", "birds", "30", "--root", corpora[0])


def test_stats_show_what_is_in_a_corpus(data):
    shown = " ".join(data("stats", "birds").split())
    for said in ("train 30 images", "val 10 images", "classes 2", "PNG RGB 40", "not_an_image 1", LEAK):
        assert said in shown
    whole = json.loads(data("stats", "birds", "--json"))
    assert [found["count"] for found in whole["leakage"].values()] == [2]


def test_names_of_strangers_are_shown_escaped(place, vitline, tmp_path, monkeypatch):
    """A colour, a line break, a change of direction and what looks like markup: shown, and nothing is done by them."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("\x1b[31mred", "line\nbreak", "a\u202eb", "[bold]c")):
        for k in range(4):
            fill(tmp_path / "evil/train" / name / f"{k}.png", picture(1000 + 10 * i + k))
    fill(tmp_path / "evil/train/[bold]c/bro\nken.png", b"no picture")
    root = str(tmp_path / "store")
    request = source_request(root, str(tmp_path / "evil"), "evil", overrides={"execution.max_refused_fraction": 0.5})
    prepare([request], root)
    prep = ("prep", "--source", tmp_path / "evil", "--name", "evil", "--set", "execution.max_refused_fraction=0.5")
    for arguments in (("stats", "evil"), ("show", "evil"), (*prep, "--dry-run"), prep):
        code, out, said = vitline("data", *arguments, "--root", root)
        assert code == 0, said
        assert "\x1b" not in out + said
        assert "\u202e" not in out + said
        if "bro" in out:
            assert "bro\\nken.png" in out
        if arguments[0] != "prep" or "--dry-run" in arguments:
            assert all(name in out for name in (r"\x1b[31mred", r"line\nbreak", r"a\u202eb", "[bold]c"))


@pytest.mark.parametrize("root", ["/proc/nostore", "file", "file/store"])
def test_a_root_that_cannot_be_written_is_named_with_its_setting(vitline, place, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITLINE_HOME", raising=False)
    (tmp_path / "file").write_text("x")
    code, out, err = vitline("data", "prep", "--source", place / "birds", "--name", "b", "--root", root)
    assert (code, out) == (1, "")
    assert f"{root} cannot be written: " in err or f"{root}/runs/prepare-b-" in err
    assert "--root or $VITLINE_ROOT gives" in err


def test_a_diff_names_the_examples(data):
    both = json.loads(data("diff", "birds", "clean", "--json"))
    removed = both["examples"]["removed"]
    assert {each["example_id"] for each in removed["first"]} == {"train/owl/0.png", "train/wren/1.png"}
    assert both["examples"]["added"]["count"] == 0
    assert {"what": "recipe: decontaminate", "a": "[]", "b": "['pets']"} in both["differences"]
    shown = data("diff", "birds", "clean")
    assert "only in the first: 2" in shown
    assert "train/owl/0.png" in shown
    assert "are equal" in data("diff", "birds", "birds")


def test_a_dry_run_writes_its_sheet_beside_the_logs_and_nothing_else(data, corpora, place, tmp_path):
    here = sorted(tmp_path.iterdir())
    before = open_store(corpora[0]).list()
    prep = (
        "prep",
        "--dry-run",
        "--source",
        place / "birds",
        "--name",
        "new",
        "--set",
        "recipe.min_images_per_class=20",
    )
    out = data(*prep, "--take", "5")
    shown = " ".join(out.split())
    for said in (
        "not_an_image 1",
        "41,",
        "PNG RGB 100 %",
        "of this machine",
        "would be left out: 1",
        "the first 5 of train, which has 15 rows",
        "beside starting the job, listing and planning",
    ):
        assert said in shown
    found = json.loads(data(*prep, "--json"))
    assert found["classes"] == {"owl": 25, "wren": 15}
    assert (found["splits"], found["refused"]["small_class"]["value"]) == ({"train": 15, "val": 10}, 15)
    page = Path(found["sample_sheet"])
    assert page == Path(corpora[0]).parent / "dry-runs" / "new.html"
    assert sorted(tmp_path.iterdir()) == here  # the folder in which the command was given
    assert page.read_text().count("data:image/webp") == 12
    assert open_store(corpora[0]).list() == before


def test_a_dry_run_without_a_place_for_its_sheet_still_says_what_to_expect(data, place, corpora):
    prep = ("prep", "--dry-run", "--source", place / "birds", "--name", "other")
    sheet = Path(corpora[0]).parent / "dry-runs" / "other.html"
    sheet.mkdir(parents=True)
    shown = data(*prep)
    assert "pictures expected" in shown
    assert f"no sample sheet was written: Is a directory, at {sheet}. Set VITLINE_HOME" in shown
    assert json.loads(data(*prep, "--json"))["sample_sheet"] is None
    sheet.rmdir()
    assert all(f"sample sheet: {sheet}" in data(*prep) for _ in range(2))


def test_a_view_larger_than_train_is_refused_by_the_dry_run(vitline, corpora, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prep = ("prep", "--dry-run", "--source", place / "birds", "--name", "new", "--take", "5k", "--root", corpora[0])
    code, out, err = vitline("data", *prep)
    assert code == 2
    assert "pictures expected" in out
    assert "error: take 5,000: train of new will have 30 rows at most. Ask for fewer" in err


def test_a_source_that_is_not_of_its_kind_is_refused(refused, vitline, corpora, place):
    at = ("--root", corpora[0])
    prep = ("data", "prep", "--source", place / "birds", "--name", "x", *at)
    assert "needs source.layout" in refused(*prep, "--kind", "arrays")
    (place / "nothing" / "owl").mkdir(parents=True)
    for command in (("data", "prep"), ("data", "prep", "--dry-run"), ("run",)):
        said = refused(*command, "--source", place / "nothing", "--name", "x", *at)
        assert f"The folder {place / 'nothing'} holds no file. Give one that" in said
    assert "no field 'source.lynks'" in refused(*prep, "--set", "source.lynks=skip")
    assert "There is no corpus 'dogs' below" in refused(*prep, "--decontaminate", "dogs")
    said = refused(*prep, "--set", "source.links=maybe")
    assert "source.links: " in said
    assert "`--set source.links=VALUE` changes it" in said
    assert "`--set recipe.decode.background=VALUE`" in refused(*prep, "--set", "recipe.decode.background=[1,2]")
    assert "does not exist" in refused("data", "prep", "--source", place / "none", "--name", "x", *at)
    assert "`--name birds-2026`" in refused("data", "prep", "--source", place / "birds", *at)
    said = refused(*prep, "--set", "recipe.class_map=imagenet21k-winter21")
    assert (
        "no package that we know of holds it. Give a file of one synset id a line as imagenet21k-winter21=URI" in said
    )
    (place / "table").mkdir()
    (place / "table/labels.csv").write_text("image,label\n")
    table = ("--source", place / "table/labels.csv", "--name", "x", "--kind", "table", "--dry-run", *at)
    code, _, said = vitline("data", "prep", *table, "--set", "source.labels_column=label")
    assert code == 2
    assert "labels.csv holds no example. Expected are" in said


def test_segments_are_shown_as_people_read_them(data):
    view = json.loads(data("take", "birds", "7", "--json"))["version"]
    assert "train/s000, 30 rows in 1 shards" in data("show", "birds")
    shown = data("show", f"birds/{view}")
    assert "train/s000, 7 rows in 1 shards, whose last 23 rows are left out, of version" in shown
    assert "rows_left_out" not in shown


def test_many_leaks_are_summed_up():
    found = Findings(count=5)
    leaks = {Leak(own_split="train", corpus=f"set-{i}/0a", corpus_split="test"): found for i in range(9)}
    lines = leak_lines(SimpleNamespace(leakage=leaks))
    assert len(lines) == 4
    assert lines[3].startswith("6 more such matches, with splits of set-3, set-4, set-5")


def test_what_is_in_test_is_told_before_what_is_in_val():
    leaks = {
        Leak(own_split="train", corpus="a/0a", corpus_split="val"): Findings(count=9),
        Leak(own_split="train", corpus="b/0a", corpus_split="test"): Findings(count=2),
        Leak(own_split="train", corpus="a/0a", corpus_split="test"): Findings(count=3),
    }
    lines = leak_lines(SimpleNamespace(leakage=leaks))
    assert [line.partition(";")[0] for line in lines] == [
        "3 training images match the test split of a",
        "2 training images match the test split of b",
        "9 training images match the val split of a",
    ]


def test_progress_is_of_the_stage_that_is_not_done_yet():
    first, second = open_store("memory://progress/a"), open_store("memory://progress/b")
    assert preparation_progress([first, second]) is None
    Progress(first, "list", 0, "files")
    assert preparation_progress([first, second])["unit"] == "files (list)"
    Progress(first, "examine", 4, "parts", done=1).add(3, 2, images=100, num_bytes=5_000_000)
    second.write_json(
        "_work/progress.json", first.read_json("_work/progress.json") | {"done": 1, "refused": 5, "rate": 1.0}
    )
    now = preparation_progress([first, second])
    assert (now["step"], now["total_steps"], now["unit"], now["refused"]) == (5, 8, "parts (examine)", 7)
    assert now["images_per_s"] == 2 * first.read_json("_work/progress.json")["images_per_s"] > 0
    assert now["remaining_s"] > 0
    Progress(first, "plan", 1, "corpus")
    assert preparation_progress([first, second])["unit"] == "parts (examine)"
    shown = line("prepare", now | {"images_per_s": 640.2, "bytes_per_s": 66e6, "remaining_s": 70}, 3)
    assert shown == "prepare: 5/8 parts (examine), 640 images/s, 66.0 MB/s, 7 refused, 1:10 left"


@pytest.mark.parametrize(
    ("stage", "done", "total", "rate", "examine_s", "left_s"),
    [
        ("list", 10, 0, 5.0, None, None),
        ("examine", 0, 4, 0.0, None, None),
        ("examine", 1, 4, 0.5, None, 6 + 8 * 0.4),
        ("plan", 0, 1, 0.0, 100.0, 100 * 0.4),
        ("plan", 0, 1, 0.0, None, None),  # an earlier attempt had examined everything
        ("write", 1, 2, 0.1, 8.0, 10 + 8 * 0.05),
        ("write", 1, 2, 0.1, None, 10),
    ],
)
def test_time_left_is_that_to_the_end_of_all_stages(stage, done, total, rate, examine_s, left_s):
    shown = {"done": done, "total": total, "rate": rate, "examine_s": examine_s, "started_at": time.time()}
    found = remaining_s(stage, [shown])
    assert found is None if left_s is None else found == pytest.approx(left_s, rel=0.01)


def test_mlflow_gets_report_and_counts_of_a_preparation_and_prefect_the_links(corpora, place):
    root, made = corpora
    request, corpus = source_request(root, str(place / "birds"), "birds"), made["birds"]
    manifest = corpus.read_json("manifest.json")
    run = open_store(root).child("runs/prepare-birds-0")
    spec = PrepareSpec(run_key="prepare-birds-0", root=root, requests=(request,))
    run.write_json("config.json", spec.model_dump(mode="json"))
    done = {"birds": {"version": manifest["version"], "digest": manifest["digest"]}}
    write_state(run, "finished", 1, corpora=done)
    view = stage_snapshot(open_store(root), "prepare-birds-0")
    assert view.experiment == "vitline/prepare"
    assert view.files["report.html"] == corpus.read("report.html")
    assert json.loads(view.files["stats.json"])["num_classes"] == 2
    assert view.values["data/images_leaked"][0] == 2
    assert view.values["data/images_accepted"][0] == 40
    assert view.tags["vitline.corpus_digest"] == manifest["digest"]
    prepared = PreparedCorpus(corpus.uri, None, reused=True)
    links = corpus_links(prepared, "http://mlflow/#/experiments/1/runs/ab?workflow=x")
    assert links["report to read"] == "[in MLflow](http://mlflow/#/experiments/1/runs/ab/artifacts/report.html)"
    assert links["report"] == f"`{corpus.uri}/report.html`"
    assert corpus_links(prepared, None).keys() == {"corpus", "report"}
