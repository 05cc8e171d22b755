"""`vitline data` on real small corpora, prepared in this process: output and warnings."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.plan.corpus_stats import Findings, Leak
from vitline.data_prep.prepare.job import PrepareSpec, prepare
from vitline.data_prep.progress import StageProgress, preparation_progress, remaining_s
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.cli.groups.data import number_of
from vitline.flows.runs.prepare_corpus import (
    PreparedCorpus,
    corpus_links,
    leak_lines,
    preparation_key,
    source_request,
)
from vitline.flows.to_mlflow.stage_snapshots import stage_snapshot
from vitline.infra.runs.progress import progress_line
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store

from ...pictures import blurred


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of pictures: `birds`, 30 for training and 10 for validation; `pets`, whose test split has two of them."""
    place = tmp_path_factory.mktemp("data")
    for i in range(30):
        fill(place / "birds/train" / ("owl", "wren")[i % 2] / f"{i}.png", blurred(i, (40, 32), "PNG"))
    for i in range(10):
        fill(place / "birds/val/owl" / f"v{i}.png", blurred(100 + i, (40, 32), "PNG"))
        fill(place / "pets/train/cat" / f"{i}.png", blurred(200 + i, (40, 32), "PNG"))
    for i in range(4):
        fill(place / "pets/test/cat" / f"t{i}.png", blurred(i if i < 2 else 300 + i, (40, 32), "PNG"))
    (place / "birds/train/owl/broken.png").write_bytes(b"no picture")
    return place


def fill(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def corpora(place):
    """A root with both corpora, and with `clean`: `birds` without the images of `pets`; their stores by name."""
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
    """data(*arguments): the output of a `vitline data` command that succeeds, below the root with the corpora."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, err=False):
        code, out, messages = vitline("data", *arguments, "--root", corpora[0])
        assert code == 0, messages
        return (out, messages) if err else out

    return call


LEAK = "2 training images match the test split of pets; leave them out with --decontaminate pets (before training)"


def test_a_finished_corpus_is_found_without_a_cluster_and_warns_of_leakage(data, place):
    prep = ("prepare", "--source", place / "birds", "--name", "birds")
    out, err = data(*prep, err=True)
    assert f"warning: birds: {LEAK}" in err
    shown = " ".join(out.split())
    assert "leakage 2 training images match" in shown
    assert "(reused)" in shown
    assert "not_an_image 1" in shown
    prep = ("prepare", "--source", place / "birds", "--name", "clean", "--decontaminate", "pets")
    out, err = data(*prep, err=True)
    assert "warning" not in err
    assert "refused leakage 2, not_an_image 1 leakage none; compared with " in " ".join(out.split())


def test_a_subset_is_named_by_its_version_only(data, corpora):
    version = corpora[1]["birds"].uri.rpartition("/")[2]
    subset = json.loads(data("subset", "birds", "0.01k", "--json"))
    assert json.loads(data("subset", "birds", "10", "--json")) == subset
    assert json.loads(data("show", "birds", "--json"))["version"] == version
    shown = json.loads(data("show", f"birds/{subset['version']}", "--json"))
    assert (shown["made_of"], shown["segments"]) == (f"first 10 of train of {version}", 1)
    listed = {row["version"]: row for row in json.loads(data("ls", "--json"))["corpora"] if row["name"] == "birds"}
    assert listed[subset["version"]]["view_of"]["take"] == 10
    assert listed[subset["version"]]["splits"] == {"train": 10, "val": 10}
    assert listed[version]["view_of"] is None
    out = data("show", f"birds/{subset['version']}")
    assert f"Statistics of birds/{version}, of which birds/{subset['version']} is a subset" in out
    assert "30 images" in out


def test_nothing_can_be_added_to_a_subset(data, refused, corpora, place):
    """It is refused at once, the error names the corpus to add to, and the store is unchanged."""
    root, whole = corpora[0], corpora[1]["birds"].uri.rpartition("/")[2]
    version = json.loads(data("subset", "birds", "12", "--json"))["version"]
    inner = json.loads(data("subset", f"birds/{version}", "7", "--json"))["version"]
    before = open_store(root).list()
    for subset in (version, inner):
        prep = ("data", "prepare", "--source", place / "pets", "--add-to", f"birds/{subset}", "--root", root)
        for dry in ((), ("--dry-run",)):
            assert f"Add to birds/{whole}." in refused(*prep, *dry)
    assert open_store(root).list() == before


def test_verify_reports_intact_shards_and_missing_auxiliary_files(data, corpora, vitline):
    root, made = corpora
    subset = json.loads(data("subset", "birds", "7", "--json"))
    shown = " ".join(data("verify", f"birds/{subset['version']}").split())
    assert "rows, of which this subset has 17, are as written" in shown
    assert data("verify", "birds").endswith("rows are as written.\n")
    assert data("verify", "birds", "--pixels").endswith("rows are as written, and every image is intact.\n")
    report = made["birds"].read("report.html")
    made["birds"].delete("report.html")
    code, out, err = vitline("data", "verify", "birds", "--root", root)
    made["birds"].write("report.html", report)
    assert code == 1
    assert "report.html is missing" in out
    assert "can be trained on" in err


def test_a_subset_of_a_test_split_does_not_weaken_decontamination(data, corpora, place):
    root, made = corpora
    data("subset", "pets", "1", "--split", "test")
    request = source_request(root, str(place / "birds"), "clean", decontaminate=("pets",))
    assert corpus_store(open_store(root), request) == made["clean"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1000", 1000), ("1,000", 1000), ("50k", 50_000), ("30M", 30_000_000), ("1.5G", 1_500_000_000), ("0.001k", 1)],
)
def test_numbers_of_rows_may_have_units_and_separators(text, number):
    assert number_of(text) == number


@pytest.mark.parametrize("text", ["", "M", "0", "-3", "1.5", "30X", "nan", "1e400"])
def test_an_invalid_number_of_rows_is_refused(refused, corpora, text):
    assert "is not a number of rows" in refused("data", "subset", "birds", "--root", corpora[0], "--", text)


def test_stats_show_the_content_of_a_corpus(data):
    shown = " ".join(data("show", "birds").split())
    for text in ("train 30 images", "val 10 images", "classes 2", "PNG RGB 40", "not_an_image 1", LEAK):
        assert text in shown
    whole = json.loads(data("show", "birds", "--json"))["statistics"]
    assert [found["count"] for found in whole["leakage"].values()] == [2]


def test_untrusted_names_are_shown_escaped(place, vitline, tmp_path, monkeypatch):
    """A colour, a line break, a change of direction and markup in names are shown and have no effect."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("\x1b[31mred", "line\nbreak", "a\u202eb", "[bold]c")):
        for k in range(4):
            fill(tmp_path / "evil/train" / name / f"{k}.png", blurred(1000 + 10 * i + k, (40, 32), "PNG"))
    fill(tmp_path / "evil/train/[bold]c/bro\nken.png", b"no picture")
    root = str(tmp_path / "store")
    request = source_request(root, str(tmp_path / "evil"), "evil", overrides={"execution.max_refused_fraction": 0.5})
    prepare([request], root)
    prep = ("prepare", "--source", tmp_path / "evil", "--name", "evil", "--set", "execution.max_refused_fraction=0.5")
    for arguments in (("show", "evil"), (*prep, "--dry-run"), prep):
        code, out, err = vitline("data", *arguments, "--root", root)
        assert code == 0, err
        assert "\x1b" not in out + err
        assert "\u202e" not in out + err
        if "bro" in out:
            assert "bro\\nken.png" in out
        if arguments[0] != "prepare" or "--dry-run" in arguments:
            assert all(name in out for name in (r"\x1b[31mred", r"line\nbreak", r"a\u202eb", "[bold]c"))


@pytest.mark.parametrize("root", ["/proc/nostore", "file", "file/store"])
def test_the_error_for_a_root_that_cannot_be_written_names_its_setting(vitline, place, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITLINE_HOME", raising=False)
    (tmp_path / "file").write_text("x")
    code, out, err = vitline("data", "prepare", "--source", place / "birds", "--name", "b", "--root", root)
    assert (code, out) == (1, "")
    assert f"{root} cannot be written: " in err or f"{root}/runs/prepare-b-" in err
    assert "--root or $VITLINE_ROOT for corpora" in err


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
        "prepare",
        "--dry-run",
        "--source",
        place / "birds",
        "--name",
        "new",
        "--set",
        "recipe.min_images_per_class=20",
    )
    out = data(*prep)
    shown = " ".join(out.split())
    for text in (
        "not_an_image 1",
        "41,",
        "PNG RGB 100 %",
        "of this machine",
        "would be left out: 1",
        "without starting the job, listing and planning",
    ):
        assert text in shown
    found = json.loads(data(*prep, "--json"))
    assert found["classes"] == {"owl": 25, "wren": 15}
    assert (found["splits"], found["refused"]["small_class"]["value"]) == ({"train": 15, "val": 10}, 15)
    page = Path(found["sample_sheet"])
    assert page == Path(corpora[0]).parent / "dry-runs" / "new.html"
    assert sorted(tmp_path.iterdir()) == here  # the folder in which the command was given
    assert page.read_text().count("data:image/webp") == 12
    assert open_store(corpora[0]).list() == before


def test_a_dry_run_that_cannot_write_its_sheet_still_reports_what_to_expect(data, place, corpora):
    prep = ("prepare", "--dry-run", "--source", place / "birds", "--name", "other")
    sheet = Path(corpora[0]).parent / "dry-runs" / "other.html"
    sheet.mkdir(parents=True)
    shown = data(*prep)
    assert "images expected" in shown
    assert f"no sample sheet was written to {sheet}: Is a directory. Set VITLINE_HOME" in shown
    assert json.loads(data(*prep, "--json"))["sample_sheet"] is None
    sheet.rmdir()
    assert all(f"sample sheet: {sheet}" in data(*prep) for _ in range(2))


def test_source_that_does_not_match_its_kind_is_refused(refused, vitline, corpora, place):
    at = ("--root", corpora[0])
    prep = ("data", "prepare", "--source", place / "birds", "--name", "x", *at)
    assert "needs source.layout" in refused(*prep, "--kind", "arrays")
    (place / "nothing" / "owl").mkdir(parents=True)
    for command in (("data", "prepare"), ("data", "prepare", "--dry-run"), ("train-folder",)):
        error = refused(*command, "--source", place / "nothing", "--name", "x", *at)
        assert f"The folder {place / 'nothing'} holds no file. Give a folder that" in error
    assert "no field 'source.lynks'" in refused(*prep, "--set", "source.lynks=skip")
    assert "There is no corpus 'dogs' below" in refused(*prep, "--decontaminate", "dogs")
    error = refused(*prep, "--set", "source.links=maybe")
    assert "source.links: " in error
    assert "`--set source.links=VALUE` changes it" in error
    assert "`--set recipe.decode.background=VALUE`" in refused(*prep, "--set", "recipe.decode.background=[1,2]")
    assert "does not exist" in refused("data", "prepare", "--source", place / "none", "--name", "x", *at)
    assert "`--name birds-2026`" in refused("data", "prepare", "--source", place / "birds", *at)
    error = refused(*prep, "--set", "recipe.class_map=imagenet21k-winter21")
    assert (
        "no package that we know contains it. Give a file with one synset id per line as imagenet21k-winter21=URI"
        in error
    )
    (place / "table").mkdir()
    (place / "table/labels.csv").write_text("image,label\n")
    table = ("--source", place / "table/labels.csv", "--name", "x", "--kind", "table", "--dry-run", *at)
    code, _, error = vitline("data", "prepare", *table, "--set", "source.labels_column=label")
    assert code == 2
    assert "labels.csv holds no example" in error


def test_segments_are_shown_as_text(data):
    subset = json.loads(data("subset", "birds", "7", "--json"))["version"]
    assert "train/s000, 30 rows in 1 shards" in data("show", "birds")
    shown = data("show", f"birds/{subset}")
    assert "train/s000, 7 rows in 1 shards, whose last 23 rows are left out, of version" in shown
    assert "rows_left_out" not in shown


def test_many_leaks_are_summarised():
    found = Findings(count=5)
    leaks = {Leak(own_split="train", corpus=f"set-{i}/0a", corpus_split="test"): found for i in range(9)}
    lines = leak_lines(SimpleNamespace(leakage=leaks))
    assert len(lines) == 4
    assert lines[3].startswith("6 more such matches, with splits of set-3, set-4, set-5")


def test_leakage_into_test_is_listed_before_leakage_into_val():
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


def test_progress_is_that_of_the_first_unfinished_stage():
    first, second = open_store("memory://progress/a"), open_store("memory://progress/b")
    assert preparation_progress([first, second]) is None
    StageProgress("list", [first]).begin(first.uri, 0, "files")
    assert preparation_progress([first, second])["unit"] == "files (list)"
    examined = StageProgress("examine", [first])
    examined.begin(first.uri, 4, "parts", done=1)
    examined.add(first.uri, 3, 2, images=100, num_bytes=5_000_000)
    assert preparation_progress([first])["remaining_s"] is None  # after a moment there is nothing to estimate from
    second.write_json(
        "_work/progress.json", first.read_json("_work/progress.json") | {"done": 1, "refused": 5, "rate": 1.0}
    )
    now = preparation_progress([first, second])
    assert (now["step"], now["total_steps"], now["unit"], now["refused"]) == (5, 8, "parts (examine)", 7)
    assert now["images_per_s"] == 2 * first.read_json("_work/progress.json")["images_per_s"] > 0
    assert now["remaining_s"] > 0
    StageProgress("plan", [first]).begin(first.uri)
    assert preparation_progress([first, second])["unit"] == "parts (examine)"
    shown = progress_line("prepare", now | {"images_per_s": 640.2, "bytes_per_s": 66e6, "remaining_s": 70}, 3)
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
def test_the_time_left_includes_all_remaining_stages(stage, done, total, rate, examine_s, left_s):
    shown = {"done": done, "total": total, "rate": rate, "examine_s": examine_s, "started_at": time.time()}
    found = remaining_s(stage, [shown])
    assert found is None if left_s is None else found == pytest.approx(left_s, rel=0.01)


def test_a_preparation_shows_report_and_counts_in_mlflow_and_links_in_prefect(corpora, place):
    root, made = corpora
    request, corpus = source_request(root, str(place / "birds"), "birds"), made["birds"]
    manifest = corpus.read_json("manifest.json")
    run = open_store(root).child("runs/prepare-birds-0")
    spec = PrepareSpec(run_key="prepare-birds-0", root=root, requests=(request,))
    run.write_json("config.json", spec.model_dump(mode="json"))
    done = {"birds": {"version": manifest["version"], "digest": manifest["digest"]}}
    write_state(run, "finished", 1, corpora=done)
    snapshot = stage_snapshot(open_store(root), "prepare-birds-0")
    assert snapshot.experiment == "vitline/prepare"
    assert snapshot.files["report.html"] == corpus.read("report.html")
    assert json.loads(snapshot.files["stats.json"])["num_classes"] == 2
    assert snapshot.values["data/images_leaked"][0] == 2
    assert snapshot.values["data/images_accepted"][0] == 40
    assert snapshot.tags["vitline.corpus_digest"] == manifest["digest"]
    prepared = PreparedCorpus(corpus.uri, load_manifest(corpus), reused=True)
    urls = {preparation_key(["birds"], [corpus], root): "http://mlflow/#/experiments/1/runs/ab?workflow=x"}
    services = SimpleNamespace(root=root, sender=SimpleNamespace(run_url=urls.get))
    links = corpus_links(prepared, services)
    assert links["report page"] == "[in MLflow](http://mlflow/#/experiments/1/runs/ab/artifacts/report.html)"
    assert links["report"] == f"`{corpus.uri}/report.html`"
    urls.clear()
    assert corpus_links(prepared, services).keys() == {"corpus", "report"}
