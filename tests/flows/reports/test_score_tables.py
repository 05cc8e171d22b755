"""Score tables, from records in a store to the console, JSON, Markdown and HTML."""

import json

import pytest

from vitline.flows.cli.tables import pieces
from vitline.flows.reports.compare_runs import published_beside
from vitline.flows.reports.score_lines import own_table, text_tables, transfer_table, vtab_table
from vitline.flows.reports.score_report import published_for, read_report
from vitline.flows.reports.score_tables import score_tables_markdown, table_markdown
from vitline.flows.reports.scored_models import ModelFacts, device_days, model_facts
from vitline.infra.runs.journal import Journal
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.evaluation.calibration import Bin, Calibration
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.reference.corruption_errors import ALEXNET_ERRORS
from vitline.vit.evaluation.reference.report import VTAB_CORPORA
from vitline.vit.evaluation.tasks import IMAGENET_C
from vitline.vit.models.variants import network_variant

from ...elements import Elements

L16 = {"converted_from": "/weights/imagenet21k/ViT-L_16.npz"}
B16_HEAD = {"converted_from": "/weights/imagenet21k+imagenet2012/ViT-B_16.npz"}


class Scored:
    """A root with models without weights, and their scores."""

    def __init__(self, path):
        self.root, self.store = str(path), open_store(path)

    def model(self, name, variant="b16", provenance=None, image_size_px=384):
        digest = name.encode().hex().ljust(64, "0")
        config = {
            "model": network_variant(variant, image_size_px=image_size_px).model_dump(mode="json"),
            "num_classes": 1000,
            "provenance": provenance or {},
            "digest": digest,
        }
        self.store.write_json(f"models/{name}/1/config.json", config)
        return self.store.uri_of(f"models/{name}/1"), digest

    def add(self, model, task, value, protocol="vit-paper", seed=0, num_examples=10_000, **more):
        uri, digest = model or (None, None)
        score = Score(
            task=task, protocol=protocol, seed=seed, model=uri, model_digest=digest, value=value,
            num_examples=num_examples, chosen={}, tried=(), majority_fraction=0.25, num_classes=4, corpus_digest="c",
            wall_s=90, cpu_s=80, trials=("one", "two"), **more,
        )  # fmt: skip
        init = digest[:12] if digest else "scratch-0123456789ab"
        self.store.write(f"scores/{task}/{protocol}/{init}-s{seed}-abcdef.json", score.model_dump_json().encode())
        return score


@pytest.fixture
def scored(tmp_path):
    return Scored(tmp_path)


def line(table, start):
    return next(row for row in table.rows if row[0].startswith(start))


def test_vtab_scores_are_compared_with_the_row_of_the_same_network(scored):
    model = scored.model("ours", "l16", L16)
    for task in VTAB_CORPORA:
        for seed in (0, 1):
            scored.add(model, task, 0.7 + 0.01 * seed, seed=seed)
    table = vtab_table(read_report(scored.root))
    ours, noise, minus = table.rows[:3]
    assert ours[0] == "ours/1, vit-paper"
    assert (len(ours), ours[1], ours[-1]) == (24, "70.5", "70.50")
    assert noise[0] == "  mean of 2 seeds, ± standard deviation"
    assert {*noise[1:]} == {"0.7", "0.71"}  # 0.01 / sqrt(2); two decimals for the mean, as all tasks move together
    assert minus[0] == "  minus ViT-L/16 (I21k)"
    assert (minus[1], minus[2], minus[-1]) == ("-20", "-14", "-2.22")  # 90.8, 84.1, 72.72
    assert line(table, "ViT-L/16 (I21k)")[1] == "90.8"
    assert max(len(cell) for row in table.rows for cell in row[1:-1]) == 4


def test_tables_name_the_precision_that_is_not_float32(scored):
    half, both = scored.model("half"), scored.model("both")
    for task in ("vtab-dtd", "birds"):
        scored.add(half, task, 0.7, precision="bfloat16")
    scored.add(both, "vtab-dtd", 0.7, precision="bfloat16")
    scored.add(both, "vtab-dtd", 0.7, seed=1)
    report = read_report(scored.root)
    labels = [row[0] for row in vtab_table(report).rows]
    assert {"half/1, vit-paper in bfloat16", "both/1, vit-paper in bfloat16 and float32"} <= {*labels}
    assert own_table(report).rows[0][:3] == ("birds", "half/1", "vit-paper in bfloat16")


def test_a_mean_over_some_tasks_shows_their_number(scored):
    scored.add(scored.model("ours"), "vtab-dtd", 0.5)
    table = vtab_table(read_report(scored.root, compare_with="ViT-L/16 (I21k)"))
    assert line(table, "ours")[-1] == "-"
    assert line(table, "  mean of 1 of 19")[-1] == "50.00"
    assert line(table, "  minus ViT-L/16 (I21k), same 1")[-1] == "-24.10"
    assert line(table, "  ± standard error of the test split")[3] == "0.5"


def test_a_network_is_not_compared_with_another_network(scored):
    scored.add(scored.model("ours", "b16", L16), "vtab-dtd", 0.5)
    assert not any("minus" in row[0] for row in vtab_table(read_report(scored.root)).rows)


def test_whole_data_sets_are_kept_apart_from_tasks_of_vtab_with_similar_names(scored):
    model = scored.model("ours", "l16", L16)
    scored.add(model, "cifar100", 0.9344, protocol="vit-paper-transfer")
    scored.add(model, "vtab-cifar100", 0.5)
    report = read_report(scored.root)
    table = transfer_table(report)
    assert line(table, "ours")[5] == "93.44 ±0.25"
    assert line(table, "  minus ViT-L/16 (I21k), 384 px")[5] == "+0.00 ±0.25"
    assert line(vtab_table(report), "ours")[2] == "50.0"


def test_own_tasks_and_probes_have_separate_tables(scored):
    model = scored.model("ours")
    scored.add(model, "digits", 0.9)
    scored.add(None, "digits", 0.8)
    for protocol in ("knn", "fewshot-10", "fewshot-5", "linear", "head"):
        scored.add(model, "digits", 0.85, protocol=protocol, num_examples=400)
    _, own, frozen, _ = text_tables(read_report(scored.root))
    assert [row[1:4] for row in own.rows] == [
        ("ours/1", "vit-paper", "90.0"),
        ("from scratch (012345)", "vit-paper", "80.0"),
    ]
    assert frozen.columns == ("model", "task", "5 shots", "10 shots", "own head", "kNN", "linear")
    assert frozen.rows[0][1:] == ("digits", *["85.00 ±1.79"] * 5)


def test_calibration_is_a_table_over_all_protocols_that_give_probabilities(scored):
    def calibration(ece):
        return Calibration(ece=ece, bins=(Bin(examples=10, confidence=0.9, accuracy=0.9 - ece),))

    model = scored.model("ours")
    for seed, ece in enumerate((0.1, 0.2)):
        scored.add(model, "vtab-dtd", 0.75, seed=seed, calibration=calibration(ece))
    scored.add(model, "digits", 0.85, protocol="knn", calibration=calibration(0.05))
    scored.add(model, "digits", 0.85, protocol="fewshot-5")
    scored.add(None, "digits", 0.8)
    table = next(t for t in text_tables(read_report(scored.root)) if t.title.startswith("Calibration"))
    assert table.columns == ("model", "task", "protocol", "top-1", "mean confidence", "ECE")
    assert [row[1:] for row in table.rows] == [
        ("vtab-dtd", "vit-paper", "75.0", "90.0", "15.0"),
        ("digits", "knn", "85.0", "90.0", "5.0"),
    ]


def test_robustness_has_a_column_for_each_test_set_and_the_mean_corruption_error(scored):
    model, other = scored.model("ours"), scored.model("other")
    for task, value in (("imagenet", 0.85), ("imagenet-a", 0.5), ("objectnet", 0.25)):
        scored.add(model, task, value, protocol="head")
    for task in IMAGENET_C:
        scored.add(model, task, 1 - ALEXNET_ERRORS[task] / 2, protocol="head")
    scored.add(other, IMAGENET_C[0], 0.5, protocol="head")
    table = next(t for t in text_tables(read_report(scored.root)) if t.title.startswith("Robustness"))
    assert table.columns == ("model", "ImageNet", "ReaL", "V2", "A", "R", "Sketch", "ObjectNet", "C", "mCE")
    assert line(table, "ours")[1:5] == ("85.00 ±0.36", "-", "-", "50.00 ±0.50")
    # Half of AlexNet's error everywhere, whose mean is 78.90 %.
    assert line(table, "ours")[7:] == ("25.00 ±0.43", "60.55", "50.00")
    assert line(table, "other")[1:] == ("-",) * 9
    assert line(table, "ViT-H/14 (JFT), ObjectNet [1]")[7] == "61.70"


def test_objectnet_is_compared_with_the_score_of_the_paper(scored, monkeypatch):
    monkeypatch.setattr("vitline.flows.reports.scored_models.data_of_weights", lambda uri: "JFT-300M")
    model = scored.model("ours", "h14", L16)
    scored.add(model, "objectnet", 0.627, protocol="head", num_examples=18_574)
    scored.add(model, "objectnet", 0.5, protocol="linear")
    report = read_report(scored.root)
    table = next(t for t in text_tables(report, "compared") if t.title.startswith("Robustness"))
    assert [row[0] for row in table.rows] == [
        "ours/1",
        "  minus ViT-H/14 (JFT), ObjectNet",
        "published",
        "ViT-H/14 (JFT), ObjectNet [1]",
    ]
    assert table.rows[1][7] == "+1.00 ±0.35"
    assert "App. D.9" in table.notes[1]
    assert [report.reference("frozen", row) is None for row in report.tables["frozen"]] == [False, True]


def test_severities_of_imagenet_c_have_a_table(scored):
    model = scored.model("ours")
    scored.add(model, "imagenet-c-fog", 0.6, protocol="head", by_severity={1: 0.8, 5: 0.4})
    scored.add(model, "imagenet-a", 0.6, protocol="head")
    table = next(t for t in text_tables(read_report(scored.root)) if t.title.startswith("ImageNet-C by severity"))
    assert table.rows == [("ours/1", "imagenet-c-fog", "80.00", "-", "-", "-", "40.00", "60.00")]


def test_scores_of_published_weights_are_checked(scored):
    model = scored.model("b16", "b16", B16_HEAD)
    scored.add(model, "imagenet", 0.8430, protocol="head", num_examples=50_000)
    scored.add(model, "imagenet-real", 0.8801, protocol="head", num_examples=46_837)
    table = next(t for t in text_tables(read_report(scored.root)) if t.title == "Published checks")
    rows = {row[1]: row[3:] for row in table.rows}
    assert rows["imagenet"] == ("84.30", "84.21", "+0.09", "agrees")
    assert rows["imagenet-real"] == ("88.01", "88.40", "-0.39", "differs")


def test_a_narrow_console_shows_the_groups_one_below_the_other(scored):
    table = vtab_table(read_report(scored.root))
    assert list(pieces(table, 160)) == [(1, 24)]
    assert list(pieces(table, 100)) == [(1, 9), (9, 14), (14, 24)]
    assert list(pieces(table, 10)) == [(1, 9), (9, 14), (14, 24)]  # a block is never split


def test_scores_of_paper_version_1_are_shown_on_request_only(scored):
    report = read_report(scored.root)
    assert not any(row.is_v1 for row in published_for(report, "transfer", "usual"))
    assert sum(row.is_v1 for row in published_for(report, "transfer", "every")) == 17


def test_the_command_prints_tables_writes_a_page_and_refuses_bad_options(vitline, refused, scored, tmp_path):
    scored.add(scored.model("ours", "l16", L16), "vtab-dtd", 0.75)
    page = tmp_path / "scores.html"
    code, out, err = vitline("evaluate", "report", "--root", scored.root, "--html", page)
    assert code == 0, err
    assert "minus ViT-L/16 (I21k)" in out
    assert "+0.9" in out
    assert "Caltech101" in {attributes.get("title") for _, attributes in Elements(page.read_text()).found}
    _, out, _ = vitline("evaluate", "report", "--root", scored.root, "--json")
    (row,) = json.loads(out)["tables"]["vtab"]
    assert row["reference"] == "ViT-L/16 (I21k)"
    assert row["differences"]["vtab-dtd"]["value"] == pytest.approx(0.009)
    assert row["means"]["all"]["num_tasks"] == 1
    assert "ViT-L/16 (I21k)" in refused("evaluate", "report", "--root", scored.root, "--compare-with", "ViT-L16")
    assert "cannot be written" in refused(
        "evaluate", "report", "--root", scored.root, "--html", tmp_path / "no" / "x.html"
    )


def test_the_artifact_of_a_flow_shows_all_scores_of_its_models_only(scored):
    ours, other = scored.model("ours", "l16", L16), scored.model("other")
    made = scored.add(ours, "vtab-dtd", 0.75)
    control = scored.add(None, "digits", 0.3)
    scored.add(ours, "digits", 0.9)
    scored.add(other, "digits", 0.8)
    scored.add(None, "vtab-dtd", 0.2)
    text = score_tables_markdown(scored.root, [made, control])
    assert "| DTD | 75.0 | 0.4 | +0.9 |" in text
    assert text.count("| digits |") == 2
    assert "other/1" not in text
    assert "20.0" not in text


def test_brackets_in_names_are_shown_literally(vitline, scored):
    scored.add(scored.model("[red]birds"), "digits", 0.9)
    _, out, _ = vitline("evaluate", "report", "--root", scored.root)
    assert "[red]birds/1" in out


def test_bars_in_names_do_not_break_a_markdown_table(scored):
    scored.add(scored.model("a|b"), "digits", 0.9)
    own = text_tables(read_report(scored.root), "compared")[0]
    assert "a&#124;b/1" in table_markdown(own)


def test_the_cost_of_a_model_includes_the_models_it_was_fine_tuned_from(scored):
    corpus = {"num_classes": 21_841, "provenance": {"request": {"source": {"kind": "imagenet21k"}}}}
    scored.store.write_json("corpora/i21k/1/manifest.json", corpus)
    first, _ = scored.model("first", "b16", {"run_key": "first-1", "images_seen": 303_000_000 * 7}, 224)
    tuned, _ = scored.model("tuned", "b16", {"run_key": "tuned-1", "images_seen": 512}, 224)
    for key, config in (
        ("first-1", {"corpus": scored.store.uri_of("corpora/i21k/1")}),
        ("tuned-1", {"init_model": first}),
    ):
        run = scored.store.child(f"runs/{key}")
        run.write_json("config.json", {"config": config})
        write_state(run, "finished", 1)
        run.write_json(
            "starts/a1-from-none-000.json", {"at": run.read_json("state.json")["updated_at"] - 43_200, "world_size": 8}
        )
    facts = model_facts(scored.root, tuned)
    # Table 6 prints 224 exaFLOPs for ViT-B/16 after 7 epochs of JFT-300M; its head has 18,291 classes.
    assert (facts.architecture, facts.data) == ("ViT-B/16", "ImageNet-21k")
    assert facts.exaflops == pytest.approx(224, rel=0.005)
    assert facts.device_days == pytest.approx(2 * 8 * 0.5, rel=1e-3)


def test_a_kept_model_has_the_data_and_the_cost_of_the_model_that_it_was_fine_tuned_from(scored):
    first, _ = scored.model("own", provenance={**L16, "images_seen": 1_000_000})
    kept, _ = scored.model(
        "own-pets", provenance={"trial": "pets-final-1", "init_model": first, "images_seen": 1_000_000}
    )
    facts = model_facts(scored.root, kept)
    assert facts.data == "ImageNet-21k"
    assert facts.exaflops == pytest.approx(2 * model_facts(scored.root, first).exaflops)
    assert facts.device_days is None


def test_time_between_a_kill_and_the_next_start_is_not_counted_as_cost(tmp_path, monkeypatch):
    # Two workers for an hour, then killed; most of a day later four workers for an hour.
    run = open_store(tmp_path / "run")
    write_state(run, "finished", 2)
    end = run.read_json("state.json")["updated_at"]
    run.write_json("starts/a1-from-none-000.json", {"at": end - 86_400, "world_size": 2})
    run.write_json("starts/a2-from-step-000.json", {"at": end - 3600, "world_size": 4})
    monkeypatch.setattr("vitline.infra.runs.journal.time.time_ns", lambda: int((end - 86_400 + 3600) * 1e9))
    journal = Journal(run, 1)
    journal.record({"train/loss": 1.0}, step=10)
    journal.close()
    assert device_days(run) == pytest.approx((2 + 4) / 24, rel=1e-4)


def test_deleted_model_has_scores_and_no_architecture(scored):
    score = scored.add((scored.store.uri_of("models/gone/1"), "9" * 64), "vtab-dtd", 0.5)
    report = read_report(scored.root)
    assert report.facts["999999999999"].architecture is None
    assert score.task in report.tables["vtab"][0].cells


def test_a_model_of_a_newer_version_keeps_its_scores(scored, caplog):
    model = scored.store.child("models/new/1")
    model.write_json("config.json", {"schema_version": 2, "num_classes": 2, "model": {"architecture": "mamba"}})
    score = scored.add((model.uri, "8" * 64), "vtab-dtd", 0.5)
    report = read_report(scored.root)
    assert report.facts["888888888888"] == ModelFacts()
    assert score.task in report.tables["vtab"][0].cells
    assert "models/new/1/config.json is not a record that this version of vitline reads" in caplog.text


def test_published_columns_are_shown_for_scored_tasks_only():
    assert published_beside({"val/top1", "tasks/digits/top1"}) == {}
    transfer = published_beside({"tasks/cifar10/top1"})
    assert transfer["BiT-L R152x4 (JFT)"] == {"tasks/cifar10/top1": 0.9937}
    vtab = published_beside({"vtab/dtd/top1", "vtab/svhn/top1", "vtab/all_2of19/top1"})
    row = vtab["ViT-L/16 (I21k)"]
    assert row["vtab/structured/top1"] == pytest.approx(0.575)
    assert row["vtab/all_2of19/top1"] == pytest.approx((0.741 + 0.809) / 2)  # over the same two tasks
    assert row["vtab/all/top1"] == 0.7272
    assert "vtab/pets/top1" not in row
    assert vtab["BiT-M R152x4 (I21k), re-run"] == {
        "vtab/natural/top1": 0.8077,
        "vtab/specialized/top1": 0.8567,
        "vtab/structured/top1": 0.6108,
        "vtab/all/top1": 0.7351,
    }
