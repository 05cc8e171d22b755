"""The plan of a self-training: what it takes from the form, and what cannot fit is refused before anything is computed."""

import json

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_class_names, load_manifest
from vitline.flows.forms.forms import SelfTrainRequest
from vitline.flows.forms.self_training_plan import resolve_self_train
from vitline.infra.storage import open_store
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.recipes import recipe_named

from ...pictures import noise
from ...vit.vtab.conftest import ARCHITECTURE, published


@pytest.fixture(scope="module")
def teachers(tmp_path_factory, digits):
    """URIs of untrained models: of the digits' classes, and of others."""
    root = str(tmp_path_factory.mktemp("teachers"))
    classes = {"digits": load_class_names(digits), "birds": ["wren", "owl"]}
    return {name: published(root, name, VisionTransformer(ARCHITECTURE, len(of)), of) for name, of in classes.items()}


def plan(root, teachers, digits, **fields):
    given = {
        "teacher": teachers["digits"],
        "corpus": digits.uri,
        "unlabelled": digits.uri,
        "recipe": "digits",
        **fields,
    }
    return resolve_self_train(root, SelfTrainRequest.model_validate(given))


def test_the_form_sets_prediction_labels_and_student(root, teachers, digits):
    found = plan(
        root, teachers, digits, max_per_class=50, predicted_weight=3, train_images=1280, splits=("train", "val")
    )
    assert (found.prediction.splits, found.prediction.top_k) == (("train", "val"), 10)
    source, recipe = found.labelling.source, found.labelling.recipe
    assert (source.path, source.labels) == (f"{open_store(root).uri}/runs/{found.prediction.run_key}", "soft")
    assert (source.min_score, source.max_per_class) == (0.3, 50)
    assert (found.labelling.name, recipe.val_fraction, recipe.test_fraction) == ("digits-predicted", 0, 0)
    student = found.student_on("s3://bucket/corpora/digits-predicted/0123")
    assert (student.name, student.corpus, student.train_images) == ("digits-student", digits.uri, 1280)
    assert [(each.corpus[-4:], each.weight) for each in student.mix_with] == [("0123", 3)]


def test_the_commands_of_a_student_and_of_a_fine_tuning_show_their_plans(root, teachers, digits, vitline):
    at = ("--corpus", digits.uri, "--root", root, "--plan", "--json")
    student = ("--unlabelled", digits.uri, "--split", "train", "--split", "val", "--recipe", "digits")
    code, out, err = vitline("pretrain", "self-train", teachers["digits"], *student, *at)
    assert code == 0, err
    splits = load_manifest(digits).splits
    assert json.loads(out)["images_to_label"] == splits["train"].num_rows + splits["val"].num_rows
    assert json.loads(out)["student"]["steps"] == recipe_named("digits").make()[0].total_steps
    code, out, err = vitline("finetune", "run", "--model", teachers["digits"], "--steps", 7, *at)
    assert code == 0, err
    assert json.loads(out)["steps"] == 7
    assert not open_store(root).child("runs").list()


def test_a_teacher_of_other_classes_is_refused(root, teachers, digits):
    with pytest.raises(
        ValueError, match=r"knows none of the classes of digits, such as '0'; its first class is 'wren'\. Choose"
    ):
        plan(root, teachers, digits, teacher=teachers["birds"])


def test_corpora_of_different_decode_policies_are_refused(root, teachers, digits, tmp_path):
    for i in range(6):
        (folder := tmp_path / "source" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.png").write_bytes(noise(i, (8, 8)))
    recipe = CorpusRecipe(decode=DecodePolicy(max_side_px=4096), val_fraction=0, test_fraction=0)
    prepare([CorpusConfig(name="other", source=ClassFolders(path=str(tmp_path / "source")), recipe=recipe)], root)
    with pytest.raises(ValueError, match=r"other/\w+ and digits/\w+ were prepared with different decode policies"):
        plan(root, teachers, digits, unlabelled="other")


def test_a_field_of_the_training_that_does_not_exist_is_refused(root, teachers, digits):
    with pytest.raises(ValueError, match=r"no field 'recipe\.total_step'; .*Did you mean 'recipe\.total_steps'"):
        plan(root, teachers, digits, overrides={"recipe.total_step": 5})
