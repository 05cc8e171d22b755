"""`vitline model` on real files: the original logits from an official file, and every conversion into and out of a model."""

import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitline.flows.cli.models import open_weights

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
CASES = json.loads((GOLDEN / "model_vectors.json").read_text())["cases"]


@pytest.fixture(scope="module")
def drawn():
    """The module that draws the weights of the golden vectors."""
    spec = importlib.util.spec_from_file_location("random_weights", GOLDEN / "random_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def official(drawn, tmp_path):
    """An official file with the paper's parameter names, and images with known logits."""
    case = CASES["paper-token"]
    np.savez(tmp_path / "tiny.npz", **drawn.random_weights(case["shapes"], seed=2))
    np.save(tmp_path / "images.npy", drawn.random_images(2, case["size_px"], seed=1))
    return tmp_path


@pytest.fixture
def logits_of(official):
    """logits_of(weights): those of the images with a network from a file or folder."""

    def run(weights):
        pixels = torch.from_numpy(np.load(official / "images.npy")).permute(0, 3, 1, 2)
        with torch.inference_mode():
            return open_weights(str(official), str(weights)).model.network.eval()(pixels).numpy()

    return run


@pytest.fixture
def names(official):
    (official / "names.txt").write_text("cat\ndog\nowl\nfox\nhen\nbee\nEnte\n")
    return official / "names.txt"


def test_weights_give_the_logits_of_the_original_network(logits_of, official):
    logits, expected = logits_of(official / "tiny.npz"), np.array(CASES["paper-token"]["logits"])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() / np.abs(expected).max() <= 1e-5


def test_a_converted_model_is_listed_verified_and_gives_the_same_logits(vitline, logits_of, official, names, root):
    ours = logits_of(official / "tiny.npz")
    code, out, err = vitline(
        "model", "convert", official / "tiny.npz", "paper", "--classes", names, "--root", root, "--json"
    )
    assert code == 0, err
    done = json.loads(out)
    assert len(done["report"]["loaded"]) == 46
    assert (done["report"]["skipped"], done["report"]["missing"], done["report"]["adapted"]) == ({}, {}, [])
    assert np.array_equal(logits_of(done["written"]), ours)
    code, out, _ = vitline("model", "verify", "paper", "--root", root, "--json")
    assert (code, json.loads(out)["probe_difference"]) == (0, 0.0)
    code, out, _ = vitline("model", "show", "paper", "--root", root, "--json")
    shown = json.loads(out)
    assert (shown["classes"], shown["model"]["depth"]) == (7, 3)
    assert shown["provenance"]["converted_from"].endswith("tiny.npz")

    Image.fromarray(np.random.RandomState(0).randint(0, 256, (40, 50, 3), dtype=np.uint8)).save(official / "a.png")
    code, out, _ = vitline("model", "predict", "paper", official / "a.png", "--root", root, "--json")
    rows = json.loads(out)["predictions"]
    assert {row["class"] for row in rows} < set(names.read_text().split())
    assert [row["probability"] for row in rows] == sorted((row["probability"] for row in rows), reverse=True)
    (official / "b.png").write_bytes(b"no picture")
    code, out, err = vitline(
        "model", "predict", "paper", official / "b.png", official / "a.png", "--root", root, "--json"
    )
    assert code == 1
    assert [bool(row["error"]) for row in json.loads(out)["predictions"]] == [True] + 5 * [False]
    assert "b.png: " in err


def test_a_file_too_large_to_be_read_is_reported_and_the_others_are_predicted(vitline, official, root):
    vitline("model", "convert", official / "tiny.npz", "paper", "--root", root)
    Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(official / "a.png")
    with (official / "huge.jpg").open("wb") as file:
        file.truncate(500 * 2**30)  # a sparse file: takes no disk space
    code, out, err = vitline(
        "model", "predict", "paper", official / "huge.jpg", official / "a.png", "--root", root, "--json"
    )
    assert code == 1
    assert [bool(row["error"]) for row in json.loads(out)["predictions"]] == [True] + 5 * [False]
    assert "huge.jpg: too_many_bytes: 536,870,912,000 bytes, limit 67,108,864" in err


def test_name_with_several_versions_selects_the_newest_and_is_reported(vitline, refused, official, names, root):
    def convert(*more):
        code, out, _ = vitline("model", "convert", official / "tiny.npz", "paper", *more, "--root", root, "--json")
        assert code == 0
        return json.loads(out)["written"]

    first, second = convert(), convert("--classes", names)
    for newest, older in ((second, first), (first, second)):
        config = Path(newest.removeprefix("file://"), "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"created_at": time.time() + 10}))
        code, out, err = vitline("model", "show", "paper", "--root", root, "--json")
        assert (code, json.loads(out)["uri"]) == (0, newest)
        new, old = ("/".join(uri.split("/")[-2:]) for uri in (newest, older))
        assert f"paper is {new}, the newest of 2 versions; also: {old}" in err
        time.sleep(0.01)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"created_at": 0.5}))
    assert "MLFLOW_TRACKING_URI is not set" in refused("model", "show", "paper@candidate", "--root", root)


def test_logits_that_differ_from_the_stored_ones_are_reported(vitline, official, root):
    vitline("model", "convert", official / "tiny.npz", "paper", "--root", root)
    (config,) = Path(root).glob("models/paper/*/config.json")
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"probe": [x + 0.01 for x in tree["probe"]]}))
    code, _, err = vitline("model", "verify", "paper", "--root", root)
    assert code == 1
    assert "the weights are unchanged, but the logits of the probe image differ" in err


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_conversion_to_another_format_and_back_is_exact(vitline, logits_of, official, names, root, to):
    np.savez(
        official / "plain.npz", **{k: v for k, v in np.load(official / "tiny.npz").items() if "pre_logits" not in k}
    )
    ours = logits_of(official / "plain.npz")
    folder = official / to
    code, _, err = vitline("model", "convert", official / "plain.npz", folder, "--to", to, "--classes", names)
    assert code == 0, err
    code, out, err = vitline("model", "convert", f"{folder}", "back", "--root", root, "--json")
    assert code == 0, err
    assert np.array_equal(logits_of(json.loads(out)["written"]), ours)
    code, out, _ = vitline("model", "show", "back", "--root", root, "--json")
    assert json.loads(out)["model"]["gelu"] == "tanh"
    (classes,) = Path(root).glob("models/back/*/*/classes.json")
    assert json.loads(classes.read_text())["classes"] == names.read_text().split()


def test_inspect_writes_the_figures_and_their_page(vitline, official):
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (40, 50, 3), dtype=np.uint8)).save(official / "a.png")
    code, out, err = vitline(
        "model", "inspect", official / "tiny.npz", official / "figures", "--images", official, "--json"
    )
    assert code == 0, err
    assert {"patch-filters.png", "attention-rollout.png", "index.html"} <= set(json.loads(out)["files"])
    assert (official / "figures" / "index.html").stat().st_size > 10_000


def test_bench_and_show_report_speed_size_and_memory(vitline):
    code, out, _ = vitline("model", "bench", "ti16", "--image-size", 32, "--batch-size", 2, "--steps", 1, "--json")
    rows = json.loads(out)["speeds"]
    assert (code, [row["mode"] for row in rows]) == (0, ["forward", "training"])
    assert all(row["mfu"] > 0 and row["images_per_s"] > 0 for row in rows)
    forward, training = (row["mfu"] / row["images_per_s"] for row in rows)  # operations an image over one peak
    assert training == pytest.approx(3 * forward)
    assert all(row["largest_batch"] is None for row in rows) or torch.cuda.is_available()
    code, out, _ = vitline("model", "show", "ViT-B/16", "--json", "--tensors")
    shown = json.loads(out)
    assert (shown["parameters"], shown["memory_bytes"]["training_with_adam"]) == (86_567_656, 16 * 86_567_656)
    assert shown["tensors"]["blocks/11/fc1/weight"] == [3072, 768]


def test_invalid_weights_are_refused(refused, official, names, root):
    assert "is not b16: " in refused("model", "convert", official / "tiny.npz", "x", "--variant", "b16")
    assert "is not a network variant" in refused("model", "convert", official / "tiny.npz", "x", "--variant", "q7")
    assert "There is no file" in refused("model", "convert", official / "none.npz", "x")
    assert "is not a published model below" in refused("model", "convert", "birds", "x", "--root", root)
    (official / "pickled").mkdir()
    (official / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "is a pickle" in refused("model", "predict", f"{official}/pickled", official / "a.png")
    says = refused("model", "convert", official / "tiny.npz", official / "served", "--to", "mlflow")
    assert "is not a published model" in says
    assert "but none was given: use `--images" in refused(
        "model", "inspect", official / "tiny.npz", official / "figures"
    )
    says = refused("model", "convert", official / "tiny.npz", "s3://bucket/x", "--to", "torch-export")
    assert "writes to the local disk only" in says
    assert "is not a valid model name" in refused("model", "convert", official / "tiny.npz", "a/b", "--root", root)
    names.write_text("one\ntwo\n")
    says = refused("model", "convert", official / "tiny.npz", "x", "--classes", names, "--root", root)
    assert "has a head of 7 classes, not 2" in says


def test_a_published_model_keeps_its_class_names_and_reports_another_resolution(
    vitline, refused, official, names, root
):
    def convert(*options):
        code, out, err = vitline("model", "convert", official / "tiny.npz", "p", "--root", root, "--json", *options)
        assert code == 0, err
        return json.loads(out)["written"]

    first, second = convert("--classes", names), convert()
    assert first != second  # other class names make another model, which does not replace the first
    larger = ("model", "convert", first, "larger", "--image-size", "48", "--root", root)
    code, out, err = vitline(*larger, "--json")
    assert code == 0, err
    resampled = ["pos_embed: resampled from 4 x 4 to 6 x 6 patches (bilinear-align-corners)"]
    assert json.loads(out)["report"]["adapted"] == resampled
    assert "is not h14: " in refused(*larger, "--variant", "h14")
    names.write_text("one\ntwo\n")
    assert "has a head of 7 classes, not 2" in refused(
        "model", "predict", first, official / "a.png", "--classes", names
    )
