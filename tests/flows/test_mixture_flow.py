"""A pipeline on a mixture through real servers: form, corpora, training, record and report."""

import pytest

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.to_mlflow.stage_snapshots import pipeline_snapshot
from vitline.infra.storage import open_store

MIXED = {
    "name": "mixed",
    "corpus_weight": 2,
    "mix_with": [{"corpus": "digits-5-to-9", "weight": 1}],
    "class_map": "prefixed",
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_pipeline_prepares_and_mixes_its_corpora(flows, in_stack):
    run = flows.start("pretrain-then-transfer/tiny", **MIXED)
    flows.completes(run, timeout_s=1100)
    root = open_store(in_stack.root)
    (record,) = [record for record in list_pipelines(in_stack.root) if record.origin.flow_run_id == run]
    assert record.request["mix_with"] == [{"corpus": "digits-5-to-9", "weight": 1.0}]
    trained = next(stage.run_key for stage in record.stages if stage.stage == "pretrain")
    mixture = root.read_json(f"runs/{trained}/mixture.json")
    shares = {each["corpus"].partition("/")[0]: each["share"] for each in mixture["corpora"]}
    assert shares == pytest.approx({"digits-0-to-4": 2 / 3, "digits-5-to-9": 1 / 3})
    assert {each["digest"] for each in mixture["corpora"]} == set(record.corpora.values())
    assert mixture["classes"][0] == "digits-0-to-4/0"
    snapshot, _ = pipeline_snapshot(root, record.key)
    assert snapshot.tags["vitline.corpus_digest"] == root.read_json(f"runs/{trained}/config.json")["inputs"]["corpus"]
    report = root.read(f"reports/{record.key}.html").decode()
    assert "Pre-trained on digits-0-to-4 and digits-5-to-9, transferred to digits-5-to-9." in report

    again = flows.wait(flows.start("pretrain-then-transfer/tiny", **MIXED))
    assert again["state"]["message"].endswith(
        "(every stage finished before; nights.night=now makes it a further night)"
    )
