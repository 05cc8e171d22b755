"""The run snapshot of an evaluation, read from the store alone, and its child runs at a real MLflow server."""

import uuid

import pytest
from mlflow import MlflowClient

from vitline.data_prep.decode import DecodePolicy
from vitline.flows.to_mlflow.evaluation_snapshot import by_init, child_name, chosen_params, score_values, settings_table
from vitline.flows.to_mlflow.stage_snapshots import stage_snapshot
from vitline.infra.config import replace
from vitline.infra.mlflow.tracking import Tracking
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.evaluation.calibration import Bin, Calibration
from vitline.vit.evaluation.evaluate import EvaluationSpec, Score, TaskRef
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.evaluation.reference.corruption_errors import ALEXNET_ERRORS
from vitline.vit.evaluation.tasks import IMAGENET_C, VTAB_TASKS
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish

from ...servers.stack import send_everything

MODEL = "file:///m/emoji/1"
TRIED = (
    {"peak_lr": 0.1, "total_steps": 60, "val_top1": 0.5},
    {"peak_lr": 0.3, "total_steps": 60, "val_top1": 0.75},
)


CALIBRATION = Calibration(ece=0.125, bins=(Bin(examples=797, confidence=0.625, accuracy=0.5),))


def score(task: str, value: float, model: str | None = MODEL, protocol: str = "vit-paper", **changes) -> Score:
    found = Score(
        task=task,
        protocol=protocol,
        seed=0,
        model=model,
        model_digest=f"{model[-1]:0>64}" if model else None,
        value=value,
        num_examples=797,
        chosen=TRIED[1],
        tried=TRIED,
        majority_fraction=0.125,
        num_classes=10,
        corpus_digest="c" * 64,
        wall_s=2.0,
        cpu_s=1.0,
        trials=("t-select-1", "t-final-1"),
    )
    return replace(found, **changes)


def test_scores_have_their_metric_names():
    some = [score("digits", 0.7), score("digits", 0.6, None), score("vtab-cifar100", 0.5), score("vtab-svhn", 0.25)]
    assert score_values([*some, score("cifar100", 0.9)], {MODEL: 320}) == {
        "tasks/digits/top1": (0.7, 320),
        "tasks/digits/top1_from_scratch": (0.6, 0),
        "vtab/cifar100/top1": (0.5, 320),
        "vtab/svhn/top1": (0.25, 320),
        "tasks/cifar100/top1": (0.9, 320),
        "vtab/all_2of19/top1": (0.375, 320),
        "time/trials_s": (10.0, 0),
    }
    whole = score_values([score(task.corpus_name, 0.5) for task in VTAB_TASKS], {MODEL: 320})
    assert {"vtab/natural/top1", "vtab/specialized/top1", "vtab/structured/top1", "vtab/all/top1"} <= whole.keys()
    assert len(whole) == 19 + 4 + 1
    two = score_values([score("digits", 0.1), score("digits", 0.2, "file:///m/emoji/2")], {})
    assert two["tasks/digits/top1"] == (0.1, 0)
    assert two["tasks/digits/top1_2"] == (0.2, 0)


def test_calibration_is_a_metric_beside_top1_and_records_without_it_have_none():
    known = score("digits", 0.7, calibration=CALIBRATION)
    both = {"tasks/digits/top1": (0.7, 320), "tasks/digits/ece": (0.125, 320), "time/trials_s": (2.0, 0)}
    assert score_values([known], {MODEL: 320}) == both
    stored = {name: value for name, value in known.model_dump(mode="json").items() if name != "calibration"}
    assert score_values([known, replace(Score.model_validate(stored), seed=1)], {MODEL: 320}).keys() == both.keys()
    probe = score("digits", 0.7, None, "fewshot-5", calibration=CALIBRATION)
    assert score_values([probe], {})["fewshot/digits/5shot/ece_from_scratch"] == (0.125, 0)


def test_all_of_imagenet_c_has_means():
    some = [score(task, 0.5, protocol="head", by_severity={3: 0.25 + (n == 0)}) for n, task in enumerate(IMAGENET_C)]
    found = score_values(some, {MODEL: 320})
    assert found["head/imagenet-c/top1"] == (pytest.approx(0.5), 320)
    assert found["head/imagenet-c/mce"] == (pytest.approx(sum(0.5 / e for e in ALEXNET_ERRORS.values()) / 15), 320)
    assert found["head/imagenet-c-shot-noise/severity_3/top1"] == (0.25, 320)
    assert found["head/imagenet-c/severity_3/top1"] == (pytest.approx(0.25 + 1 / 15), 320)
    assert "head/imagenet-c/severity_2/top1" not in found
    assert not [name for name in score_values(some[1:], {}) if "imagenet-c/" in name]
    assert tuple(ALEXNET_ERRORS) == IMAGENET_C


def test_seeds_are_aggregated_in_one_metric_and_shots_are_separate_metrics():
    values = (0.1, 0.2, 0.9)
    seeds = [score("digits", value, seed=i) for i, value in enumerate(values)]
    assert score_values(seeds, {})["tasks/digits/top1"][0] == pytest.approx(0.4)
    bit = [replace(one, protocol="bit-hyperrule") for one in seeds]
    assert score_values(bit, {})["tasks/digits/top1"] == (0.2, 0)
    shots = [score("vtab-dtd", value, protocol=f"fewshot-{n}") for n, value in zip((5, 10, 25), values, strict=True)]
    assert score_values(shots, {MODEL: 7}) == {
        "fewshot/vtab-dtd/5shot/top1": (0.1, 7),
        "fewshot/vtab-dtd/10shot/top1": (0.2, 7),
        "fewshot/vtab-dtd/25shot/top1": (0.9, 7),
        "time/trials_s": (6.0, 0),
    }


def test_a_setting_does_not_overwrite_the_common_params():
    probe = score("digits", 0.5, chosen={"num_examples": 100, "ridge": 1024.0})
    assert chosen_params({"": probe}, {"num_examples"}) == {"chosen.num_examples": 100, "ridge": 1024.0}
    assert chosen_params({"fewshot-5": probe}, {"num_examples"}).keys() == {"fewshot-5.num_examples", "fewshot-5.ridge"}


def test_repeated_scores_count_once_and_are_grouped_by_task_and_model():
    a, b = score("digits", 0.5), score("digits", 0.4, None)
    assert by_init([a, b, a, replace(a, seed=1)]) == [[a, replace(a, seed=1)], [b]]


def test_children_of_an_evaluation_have_different_names():
    other = "file:///m/emoji/2"
    three = [score("digits", 0.5), score("digits", 0.4, other), score("digits", 0.3, None)]
    assert [child_name(one, [MODEL, other]) for one in three] == ["digits", "digits: emoji/2", "digits from scratch"]


def test_every_setting_is_shown_and_the_chosen_one_is_marked():
    assert settings_table("", score("digits", 0.625)).splitlines() == [
        "top-1 62.5 % of 797 images",
        "",
        "| peak_lr | total_steps | val_top1 |",
        "| --- | --- | --- |",
        "| 0.1 | 60 | 50.0 % |",
        "| **0.3** | **60** | **75.0 %** |",
    ]
    probe = score("digits", 0.5, tried=(), chosen={})
    assert settings_table("knn", probe) == "knn: top-1 50.0 % of 797 images"
    known = settings_table("knn", replace(probe, calibration=CALIBRATION))
    assert known == "knn: top-1 50.0 % of 797 images, expected calibration error 12.5 %"


@pytest.fixture
def evaluated(root, digits):
    """evaluated(scores): the key of a finished evaluation on digits with these scores, whose trials are in the store."""

    def make(*scores: Score, keep_models: bool = False) -> str:
        store = open_store(root)
        augment = AugmentConfig(image_size_px=8)
        protocol = Protocol(
            name="tiny", image_size_px=None, learning_rates=(0.1, 0.3), total_steps=60, warmup_steps=1,
            global_batch_size=16, num_lanes=4, augment=augment,
        )  # fmt: skip
        key = f"scores-{uuid.uuid4().hex[:12]}"
        spec = EvaluationSpec(
            run_key=key,
            tasks=(TaskRef(name="digits", corpus=digits.uri),),
            models=tuple(dict.fromkeys(one.model for one in scores)),
            architecture=ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32),
            protocol=protocol,
            root=root,
            keep_models=keep_models,
        )
        for one in scores:
            trial = one.trials[-1]
            files = {
                f"{trial}/abc/{name}": name.encode()
                for name in ("predictions.parquet", "confusion.csv", "top_losses.html")
            }
            for name, data in files.items():
                store.write(f"trials/{name}", data)
            result = TrialResult(
                key=trial, top1=one.value, loss=1.0, num_examples=797, majority_fraction=0.1, wall_s=1.0, cpu_s=1.0,
                train_losses=((1, 2.5), (60, 0.5)), diverged=False, files=tuple(files),
            )  # fmt: skip
            store.write(f"trials/{trial}.json", result.model_dump_json().encode())
        run = store.child(f"runs/{key}")
        acquire_lease(run, key, job_state=lambda job: "failed", owner="test")
        run.write_json("config.json", spec.model_dump(mode="json"))
        write_state(run, "finished", 1, scores=[one.model_dump(mode="json") for one in scores])
        return key

    return make


def test_a_child_for_each_task_and_model_explains_its_score(evaluated, root, digits):
    store = open_store(root)
    store.child("m/emoji/1").write_json("config.json", {"digest": "1" * 64, "provenance": {"images_seen": 320}})
    model = store.child("m/emoji/1").uri
    digest = digits.read_json("manifest.json")["digest"]
    own = score("digits", 0.7, model, corpus_digest=digest, trials=("d-select-1", "d-final-1"))
    control = score("digits", 0.5, None, corpus_digest=digest, trials=("d-select-2", "d-final-2"))
    snapshot = stage_snapshot(store, evaluated(own, control))
    assert {"protocol.name": "tiny", "protocol.kind": "finetune", "protocol.learning_rates": "0.1, 0.3",
            "model": "emoji/1", "num_seeds": 1}.items() <= snapshot.params.items()  # fmt: skip
    assert "protocol.shots" not in snapshot.params
    assert [child.name for child in snapshot.children] == ["digits", "digits from scratch"]
    first, second = snapshot.children
    assert first.values == {"tasks/digits/top1": (0.7, 320), "time/trials_s": (2.0, 0)}
    assert first.params == {"peak_lr": 0.3, "total_steps": 60, "val_top1": 0.75, "model": "emoji/1",
                            "num_examples": 797, "num_classes": 10, "precision": "float32", "majority_fraction": 0.125}  # fmt: skip
    assert first.curves == [("train/loss", 2.5, 1), ("train/loss", 0.5, 60)]
    assert first.stored_files == {
        "confusion.csv": "trials/d-final-1/abc/confusion.csv",
        "top_losses.html": "trials/d-final-1/abc/top_losses.html",
    }
    assert (first.tags["vitline.task"], first.tags["vitline.model_uri"]) == ("digits", model)
    assert first.facts[1] == f"**Predictions:** `{store.uri_of('trials/d-final-1/abc/predictions.parquet')}`"
    assert "vitline.model_digest" not in second.tags
    assert second.params["model"] == "from scratch"
    assert [corpus.name for corpus in second.corpora] == ["digits/test"]
    assert first.slug != second.slug


def test_several_seeds_share_a_child_and_keep_their_files_apart(evaluated, root):
    seeds = [score("digits", 0.5 + i / 10, None, seed=i, trials=(f"d-final-{i}",)) for i in (0, 1)]
    (child,) = stage_snapshot(open_store(root), evaluated(*seeds)).children
    assert child.values["tasks/digits/top1"][0] == pytest.approx(0.55)
    assert {"seed0.peak_lr", "seed1.val_top1"} <= child.params.keys()
    assert child.stored_files["seed1/top_losses.html"] == "trials/d-final-1/abc/top_losses.html"
    assert {name for name, _, _ in child.curves} == {"train/loss_seed0", "train/loss_seed1"}


def test_the_diagram_of_a_probe_is_a_file_of_its_child(evaluated, root):
    probe = score("digits", 0.5, trials=("d-final-7",), files=("digits-knn-x/reliability.png",))
    (child,) = stage_snapshot(open_store(root), evaluated(probe)).children
    assert child.stored_files["reliability.png"] == "trials/digits-knn-x/reliability.png"


def test_an_evaluation_without_its_trials_or_its_corpus_is_shown_without_them(evaluated, root, digits):
    store = open_store(root)
    key = evaluated(score("digits", 0.5, None, corpus_digest="gone", trials=("d-final-9",)))
    store.delete("trials/d-final-9.json")
    (child,) = stage_snapshot(store, key).children
    assert (child.curves, child.stored_files, child.corpora) == ([], {}, ())
    assert child.values["tasks/digits/top1"] == (0.5, 0)


@pytest.mark.slow
def test_a_kept_model_is_a_version_in_the_registry_of_the_run_of_its_score(evaluated, root, stack, digits):
    uri, store = stack.env["MLFLOW_TRACKING_URI"], open_store(root)
    client, trial = MlflowClient(uri, uri), f"d-final-{uuid.uuid4().hex[:12]}"
    digest, own = digits.read_json("manifest.json")["digest"], score("digits", 0.5, None, trials=(trial,))
    own, others = replace(own, corpus_digest=digest), replace(own, seed=1, trials=("d-final-absent",))
    config = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    made = {"trial": trial, "steps": 60, "images_seen": 960}
    kept = publish(
        store.child("models"), "scratch-digits", trial[-12:], build_network(config, 2), contract, ["a", "b"], made
    )
    assert stage_snapshot(store, evaluated(own, others)).children[0].models == ()
    key = evaluated(own, others, keep_models=True)
    (child,) = stage_snapshot(store, key).children
    assert [(model.uri, model.step) for model in child.models] == [(kept, 60)]
    assert send_everything(root, uri)[key] == "sent"
    version = client.get_model_version_by_alias("scratch-digits", "candidate")
    assert {"vitline.trial": trial, "vitline.run_key": key, "vitline.model_uri": kept}.items() <= version.tags.items()
    assert version.description.startswith("top-1 50.0 % of 797 test images, seed 0, 960 images seen; weights at file:")
    run = client.get_run(version.run_id)
    assert (run.info.run_name, run.data.tags["vitline.task"]) == ("digits from scratch", "digits")
    assert f"**Model:** [scratch-digits version {version.version}](" in run.data.tags["mlflow.note.content"]
    assert Tracking(uri).aliased("scratch-digits", "candidate") == kept
    assert send_everything(root, uri)[key] == "unchanged"


@pytest.mark.slow
def test_children_are_sent_once_and_found_again(evaluated, root, stack, digits):
    uri = stack.env["MLFLOW_TRACKING_URI"]
    store, client = open_store(root), MlflowClient(uri, uri)
    digest = digits.read_json("manifest.json")["digest"]
    trial = f"d-final-{uuid.uuid4().hex[:6]}"
    key = evaluated(score("digits", 0.5, None, corpus_digest=digest, trials=(trial,)))

    def sync():
        return send_everything(root, uri)

    assert sync() == {key: "sent"}
    (names,) = store.read_json(f"runs/{key}/mlflow.json")["servers"].values()
    parent = client.get_run(names["run"])
    assert parent.data.metrics["tasks/digits/top1_from_scratch"] == 0.5
    experiment = client.get_experiment_by_name("vitline/evaluate").experiment_id

    def children():
        return client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")

    (child,) = children()
    assert (child.info.run_name, child.info.status) == ("digits from scratch", "FINISHED")
    assert (child.info.start_time, child.info.end_time) == (parent.info.start_time, parent.info.end_time)
    assert child.data.metrics == {"tasks/digits/top1": 0.5, "train/loss": 0.5, "time/trials_s": 2.0}
    assert {"peak_lr": "0.3", "val_top1": "0.75", "num_examples": "797"}.items() <= child.data.params.items()
    assert {"vitline.stage": "evaluate", "mlflow.source.name": "vitline evaluate"}.items() <= child.data.tags.items()
    assert child.data.tags["vitline.run_key"] == f"{key}/digits-scratch"
    files = {file.path for file in client.list_artifacts(child.info.run_id)}
    assert files == {"scores.json", "confusion.csv", "top_losses.html"}
    assert parent.info.run_id in child.data.tags["mlflow.note.content"]
    assert child.info.run_id in parent.data.tags["mlflow.note.content"]

    def everything():
        runs = [client.get_run(run.info.run_id).to_dictionary() for run in (parent, *children())]
        return runs, [client.get_metric_history(child.info.run_id, m) for m in child.data.metrics]

    before = repr(everything())
    assert sync() == {key: "unchanged"}
    # As a sender that has lost its records: the MLflow ids in the store, and the tag that says what was sent.
    store.delete(f"runs/{key}/tasks/digits-scratch/mlflow.json")
    client.delete_tag(parent.info.run_id, "vitline.shipped")
    client.delete_tag(child.info.run_id, "vitline.shipped")
    assert sync() == {key: "sent"}
    assert repr(everything()) == before
    client.delete_run(child.info.run_id)
    client.delete_tag(parent.info.run_id, "vitline.shipped")
    assert sync() == {key: "sent"}
    assert children() == []  # a run that a user has deleted is not created again
