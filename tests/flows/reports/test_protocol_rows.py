"""The list of protocols: those of vitline, and those that a root holds."""

import json

import pytest

from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.protocols import known_protocols
from vitline.vit.models.config import ViTConfig

NETWORK = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


@pytest.fixture
def evaluated(tmp_path):
    """evaluated(key, protocol): writes an evaluation as a job finds it."""

    def write(key, protocol):
        fields = {"tasks": (TaskRef(name="t", corpus="c"),), "models": (None,), "architecture": NETWORK}
        spec = EvaluationSpec(run_key=key, protocol=protocol, root=str(tmp_path), **fields)
        run = open_store(tmp_path).child(f"runs/{key}")
        run.write_json("config.json", spec.model_dump(mode="json"))
        write_state(run, "finished", 1)

    return write


def test_user_defined_protocols_are_listed_with_their_newest_evaluation(evaluated, tmp_path, vitline):
    path = tmp_path / "mine.yaml"
    path.write_text("base: vit-paper\nprotocol: {learning_rates: [0.5], total_steps: 2500}\n")
    mine = protocol_of(str(path))
    path.write_text("base: vit-paper\nprotocol: {learning_rates: [0.25]}\n")
    changed = protocol_of(str(path))
    for key, protocol in [("b", mine), ("a", mine), ("c", changed), ("d", known_protocols()["knn"])]:
        evaluated(key, protocol)
    code, out, _ = vitline("evaluate", "protocols", "--root", tmp_path, "--json")
    rows = json.loads(out)["protocols"]
    ours, others = rows[: len(known_protocols())], rows[len(known_protocols()) :]
    assert [(row["protocol"], row["from"]) for row in ours] == [(name, "vitline") for name in known_protocols()]
    assert {row["protocol"]: row["from"] for row in others} == {mine.name: "a", changed.name: "c"}
    assert "lr 0.5, 2,500 steps" in [row["settings"] for row in others]
    assert code == 0


def test_an_evaluation_of_another_version_is_named_and_the_others_are_listed(evaluated, tmp_path, vitline):
    path = tmp_path / "mine.yaml"
    path.write_text("base: vit-paper\n")
    mine = protocol_of(str(path))
    evaluated("known", mine)
    odd = {"run_key": "odd", "protocol": {**mine.model_dump(mode="json"), "of_tomorrow": 1}}
    open_store(tmp_path).child("runs/odd").write_json("config.json", odd)
    code, out, err = vitline("evaluate", "protocols", "--root", tmp_path)
    assert code == 1
    assert mine.name in out
    assert "runs/odd/config.json is not a record that this version of vitline reads: of_tomorrow" in err
