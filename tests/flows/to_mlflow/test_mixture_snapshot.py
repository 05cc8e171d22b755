"""The MLflow run of a training on a mixture names all corpora, weights and the class map."""

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.to_mlflow.stage_snapshots import stage_snapshot
from vitline.infra.config import replace
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.run.resolved import resolve


def test_all_corpora_of_a_mixture_are_params_data_sets_and_a_file(train_config, two_corpora, root):
    uris = [Corpora(open_store(two_corpora)).find(name).store.uri for name in ("birds", "city")]
    mixture = {"corpora": [{"corpus": uris[0], "weight": 3}, {"corpus": uris[1], "weight": 1}]}
    config = replace(train_config("mix"), corpus=uris[0], mixture=mixture)
    spec = resolve(config, root).spec()
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))
    run.write_json("mixture.json", open_corpora(config).record())
    write_state(run, "running", 1)
    snapshot = stage_snapshot(open_store(root), spec.run_key)
    assert snapshot.params["corpus"] == "birds + city"
    assert snapshot.params["mixture_weights"] == "3.0, 1.0"
    assert snapshot.params["class_map"] == "names"
    assert snapshot.params["num_classes"] == 4
    assert {(each.name, each.context) for each in snapshot.corpora} == {
        ("birds", "train"),
        ("birds/val", "val"),
        ("city", "train"),
        ("city/val", "val"),
    }
    assert "mixture.json" in snapshot.files
    assert snapshot.tags["vitline.corpus_digest"] == spec.inputs["corpus"]
