"""The scores of a checkpoint beside those of the model that the run publishes, and which corpora can be probed on."""

import pytest
import torch

from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import replace
from vitline.vit.checkpoints.manifest import WeightsError
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.config import CheckpointProbeConfig, MaskedPatchConfig
from vitline.vit.corpora.probed_corpora import probed_corpora
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.features.checkpoint_score import checkpoint_network, score_checkpoint
from vitline.vit.features.extract_features import part_features
from vitline.vit.features.linear_probes import draw_shots, least_squares
from vitline.vit.features.nearest import nearest
from vitline.vit.input.batches import row_batches
from vitline.vit.published.models import load_model
from vitline.vit.run.run_spec import RunSpec
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World


@pytest.fixture
def trained(start):
    """trained(config): the run, and its published model."""

    def make(config):
        run, attempt = start(config)
        TrainingRun(run, attempt, World()).execute()
        return run, load_model(run.read_json("state.json")["model"])

    return make


@pytest.mark.parametrize(
    "recipe",
    [
        {"recipe.average_decay": 0.9},
        {"recipe.masked_patches": MaskedPatchConfig(), "recipe.model.dropout_rate": 0.0},
    ],
    ids=["averaged", "masked-patches"],
)
def test_the_last_checkpoint_scores_as_the_published_model_does(trained, train_config, digits, recipe):
    probes = CheckpointProbeConfig(every_steps=10, images=300, shots=3)
    run, model = trained(replace(train_config("probed", probes=probes), **recipe))
    manifest = load_manifest(digits)

    def features(split):
        rows = range(min(300, manifest.split(split).num_rows))
        with row_batches(digits, manifest, split, model.contract.evaluation, [rows], batch_size=50) as batches:
            return part_features(model.network, model.contract, batches, len(rows), torch.device("cpu"))

    examples, scored = features("train"), features("val")
    rows = draw_shots(examples.classes, 10, 3, seed=0)
    fewshot = least_squares(examples.values[rows], examples.classes[rows], 10).predict(scored.values)
    voted = nearest(scored.values, [(examples.values, examples.classes)]).vote(10)
    expected = {
        f"probe/{manifest.name}/{name}_top1": (predicted == scored.classes).double().mean().item()
        for name, predicted in [("knn", voted), ("fewshot", fewshot)]
    }
    assert score_checkpoint(run, list_checkpoints(run)[0], torch.device("cpu")) == expected
    assert expected[f"probe/{manifest.name}/knn_top1"] > 0.2


def test_a_checkpoint_that_is_gone_is_named(trained, train_config):
    run, _ = trained(train_config("probed", probes=CheckpointProbeConfig(every_steps=10)))
    spec = RunSpec.model_validate(run.read_json("config.json"))
    with pytest.raises(WeightsError, match="step-000000005-a1"):
        checkpoint_network(run, "checkpoints/step-000000005-a1", spec, num_classes=10)


def test_probes_without_a_cadence_are_refused():
    with pytest.raises(ValueError, match=r"probes\.shots=5 has no effect without probes\.every_steps"):
        CheckpointProbeConfig(shots=5)


def test_a_training_without_a_validation_split_needs_a_corpus_to_probe_on(train_config, digits):
    config = replace(train_config("owls", probes=CheckpointProbeConfig(every_steps=10)), val_split=None)
    with pytest.raises(ValueError, match=r"have no validation split .* execution\.probes\.corpora"):
        probed_corpora(config, open_corpora(config))
    config = replace(config, **{"execution.probes.corpora": (digits.uri,)})
    (found,) = probed_corpora(config, open_corpora(config))
    assert (found.examples, found.scored) == ("train", "val")


def test_a_corpus_that_cannot_be_probed_on_is_refused_by_name(train_config, digits):
    config = train_config("owls", probes=CheckpointProbeConfig(every_steps=10, corpora=(digits.uri,)))
    manifest = load_manifest(digits)

    def refused_with(**changes):
        opened = {digits.uri: (digits, manifest.model_copy(update=changes))}
        with pytest.raises(ValueError, match=r"execution\.probes: digits/.*execution\.probes\.corpora") as error:
            probed_corpora(config, open_corpora(config), opened)
        return str(error.value)

    assert "several labels" in refused_with(single_label=False)
    splits = {name: split for name, split in manifest.splits.items() if name != "val"}
    assert "has no split 'val', only" in refused_with(splits=splits)
