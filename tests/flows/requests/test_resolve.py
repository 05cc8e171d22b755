"""Forms resolved to configs and plans: steps and warmup from a budget, overrides, run keys, and refusals."""

import json
import shutil
from datetime import date

import pytest

from data_prep.config import CorpusConfig
from data_prep.decode import DecodePolicy
from flows.requests.forms import EvaluateRequest, FinetuneRequest, PipelineRequest, PrepareRequest, PretrainRequest
from flows.requests.resolve import (
    resolve_evaluate,
    resolve_finetune,
    resolve_pipeline,
    resolve_prepare,
    resolve_pretrain,
    tasks_text,
)
from infra.storage import open_store
from vit.input.config import AugmentConfig
from vit.input.image_contract import ImageContract
from vit.models.build import build_network
from vit.models.config import ViTConfig
from vit.published import publish
from vit.recipes import recipe_named
from vit.run_spec import make_spec
from vit.vtab.protocols import protocol_named

DIGITS = {"corpus": "digits", "recipe": "digits", "tasks": ("digits-5-to-9",)}
NIGHT = date(2026, 11, 21)


def test_a_budget_of_images_sets_steps_and_shortens_the_warmup(digits_root):
    recipe, _ = recipe_named("digits").make()
    batch = recipe.input.global_batch_size
    config = resolve_pretrain(
        digits_root, PretrainRequest(corpus="digits", recipe="digits", train_images=30 * batch + 7)
    )
    assert config.recipe.total_steps == 30
    assert config.recipe.optim.warmup_steps == recipe.optim.warmup_steps * 30 // recipe.total_steps
    assert config.name == "digits-digits"
    assert config.val_split == "val"


def test_an_override_takes_precedence_over_a_field_and_is_validated(digits_root):
    fields = {"corpus": "digits", "recipe": "digits", "peak_lr": 0.5}
    assert resolve_pretrain(digits_root, PretrainRequest(**fields)).recipe.optim.peak_lr == 0.5
    changed = PretrainRequest(**fields, overrides={"recipe.optim.peak_lr": 0.25})
    assert resolve_pretrain(digits_root, changed).recipe.optim.peak_lr == 0.25
    with pytest.raises(ValueError, match=r"no group 'recipe\.optimm'"):
        resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={"recipe.optimm.peak_lr": 1}))
    for path in ("corpus", "protocol.total_steps"):  # an override without effect is refused
        with pytest.raises(ValueError, match=path):
            resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={path: 1}))


def key(root, night=None, **changes):
    return resolve_pipeline(root, PipelineRequest(**(DIGITS | changes)), night).key


def test_equal_pipelines_have_equal_keys_and_different_ones_different_keys(digits_root):
    same = [{}, {"num_workers": 1}, {"deadline_hours": 2}, {"overrides": {"execution.log_every_steps": 1}}]
    assert len({key(digits_root, **changes) for changes in same}) == 1
    others = [
        {},
        {"seed": 1},
        {"train_images": 12800},
        {"from_scratch": False},
        {"tasks": ("digits",)},
        {"corpus": "digits-0-to-4"},
        {"overrides": {"recipe.optim.peak_lr": 0.5}},
        {"overrides": {"protocol.total_steps": 70}},
    ]
    keys = [key(digits_root, **changes) for changes in others] + [key(digits_root, NIGHT)]
    assert len(set(keys)) == len(keys)


def test_the_keys_of_a_pipeline_and_its_training_depend_on_the_night(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS), NIGHT)
    assert plan.night == NIGHT
    assert plan.key == key(digits_root, NIGHT) != key(digits_root, date(2026, 11, 22))
    config = resolve_pretrain(digits_root, PretrainRequest(corpus="digits", recipe="digits"))
    keys = {make_spec(config, digits_root, night).run_key for night in (None, NIGHT, date(2026, 11, 22))}
    assert len(keys) == 3


def test_a_changed_protocol_has_another_name(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS, overrides={"protocol.total_steps": 70}))
    assert plan.protocol.name.startswith("small-images-")
    assert plan.protocol.total_steps == (70,)


def test_presets_are_prepared_and_other_corpora_must_exist(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS))
    assert isinstance(plan.source, CorpusConfig)
    with pytest.raises(
        ValueError, match=r"no corpus 'brids' below .*; there are: digits, .*noto-emoji.*`vitline data prep`"
    ):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"corpus": "brids"}))
    with pytest.raises(ValueError, match=r"no corpus at file://.*/brids"):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"tasks": (f"{digits_root}/brids",)}))


@pytest.fixture
def some_of_vtab(digits_root, tmp_path) -> str:
    """A root with two prepared tasks of VTAB: copies of digits under their names."""
    for name in ("vtab-svhn", "vtab-dtd", "pets"):
        copy = tmp_path / "store" / "corpora" / name
        shutil.copytree(f"{digits_root}/corpora/digits", copy)
        for manifest in copy.glob("*/manifest.json"):
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": name}))
    return str(tmp_path / "store")


def test_vtab_means_its_prepared_tasks_in_every_form(some_of_vtab, digits_root, tiny):
    tasks = ("pets", "vtab", "vtab-dtd")
    plan = resolve_pipeline(some_of_vtab, PipelineRequest(corpus="pets", recipe="digits", tasks=tasks))
    assert [uri.split("/")[-2] for uri in plan.tasks] == ["pets", "vtab-dtd", "vtab-svhn"]
    evaluation = resolve_evaluate(some_of_vtab, EvaluateRequest(model=tiny, tasks=tasks))
    assert [task.name for task in evaluation.tasks] == ["pets", "vtab-dtd", "vtab-svhn"]
    text = tasks_text(some_of_vtab, tasks)
    assert text.startswith(
        "vtab means 2 of its 19 tasks here; not prepared: vtab-caltech101, vtab-cifar100, vtab-flowers102"
    )
    assert text.endswith("`vitline vtab prepare` prepares them.")
    assert tasks_text(some_of_vtab, ("pets",)) is None
    with pytest.raises(ValueError, match=r"No task of VTAB is prepared below .*vitline vtab prepare"):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"tasks": ("vtab",)}))


def test_models_must_exist(digits_root):
    with pytest.raises(ValueError, match=r"'emoji' is no published model .*none yet"):
        resolve_finetune(digits_root, FinetuneRequest(model="emoji", corpus="digits"))
    with pytest.raises(ValueError, match="no published model at file:///nowhere"):
        resolve_evaluate(digits_root, EvaluateRequest(model="/nowhere", tasks=("digits",)))


@pytest.fixture
def tiny(tmp_path) -> str:
    """A published network of 8 px."""
    network = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    return publish(open_store(str(tmp_path)), "tiny", "1", build_network(network, 2), contract, ["a", "b"], {})


def test_a_finetuning_takes_the_fields_of_a_protocol_that_the_request_leaves_out(digits_root, tiny):
    def recipe(**fields):
        return resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", **fields)).recipe

    own = recipe()
    assert (own.total_steps, own.optim.peak_lr, own.input.global_batch_size, own.model.image_size_px) == (
        500, 0.03, 512, 8
    )  # fmt: skip
    paper = recipe(protocol="vit-paper-transfer", peak_lr=0.01)
    assert (paper.total_steps, paper.optim.peak_lr, paper.model.image_size_px) == (500, 0.01, 384)
    assert paper.input.augment.train_resize_px == 448
    changed = recipe(protocol="vit-paper", steps=700, image_size_px=16, global_batch_size=64)
    assert (changed.total_steps, changed.model.image_size_px, changed.input.global_batch_size) == (700, 16, 64)
    assert changed.input.augment.train_resize_px == 19
    with pytest.raises(ValueError, match=r"chooses among the learning rates 0\.001, 0\.003, 0\.01, 0\.03: set peak_lr"):
        recipe(protocol="vit-paper-transfer")
    with pytest.raises(ValueError, match=r"chooses among 1,000, 10,000 steps: set steps to one"):
        recipe(protocol="vit-paper-v1", peak_lr=0.01)


def test_fewer_steps_shorten_the_warmup_of_a_protocol_and_overrides_take_precedence(digits_root, tiny):
    def plan(protocol, steps, **overrides):
        fields = {"protocol": protocol, "steps": steps, "peak_lr": 0.01, "image_size_px": 16, "overrides": overrides}
        recipe = resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", **fields)).recipe
        return recipe.total_steps, recipe.optim.warmup_steps

    for protocol, steps, warmup in [
        ("vit-paper-transfer", 500, 100),  # its own
        ("vit-paper-transfer", 499, 99),
        ("vit-paper-transfer", 100, 20),  # as many steps as the protocol's own warmup
        ("vit-paper-transfer", 1, 0),
        ("vit-paper-transfer", 5000, 100),
        ("vit-paper-v1", 500, 100),  # chooses between 1,000 and 10,000 steps, with 200 of warmup
        ("vtab-sweep", 10, 0),
    ]:
        assert plan(protocol, steps) == (steps, warmup)
    assert plan("vit-paper-transfer", 100, **{"recipe.optim.warmup_steps": 99}) == (100, 99)
    assert plan("vit-paper-transfer", 100, **{"recipe.total_steps": 10, "recipe.optim.warmup_steps": 9}) == (10, 9)
    with pytest.raises(ValueError, match=r"optim\.warmup_steps=100 must be less than total_steps=100"):
        plan("vit-paper-transfer", 100, **{"recipe.optim.warmup_steps": 100})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"total_steps": 10}, "warmup_steps=10 must be less than total_steps=10; .*Set a smaller warmup_steps as well"),
        ({"total_steps": [200, 7]}, "warmup_steps=10 must be less than total_steps=7"),
        ({"larger": [{"at_least": 9, "learning_rates": [0.1], "total_steps": 5, "warmup_steps": 6}]},
         r"protocol\.larger\.0: warmup_steps=6 must be less than total_steps=5"),
        ({"global_batch_size": 0}, r"protocol\.global_batch_size: must be more than 0, not 0"),
    ],
)  # fmt: skip
def test_an_impossible_protocol_is_refused_before_any_training(digits_root, tiny, overrides, says):
    changes = {f"protocol.{field}": value for field, value in overrides.items()}
    for resolve, request in [
        (resolve_evaluate, EvaluateRequest(model=tiny, overrides=changes)),
        (resolve_pipeline, PipelineRequest(**DIGITS, overrides=changes)),
    ]:
        with pytest.raises(ValueError, match=says) as refused:
            resolve(digits_root, request)
        assert "\n" not in str(refused.value)


def test_an_evaluation_takes_overrides_of_its_protocol_only(digits_root, tiny):
    def protocol(**fields):
        return resolve_evaluate(digits_root, EvaluateRequest(model=tiny, **fields)).protocol

    changed = protocol(overrides={"protocol.precision": "bfloat16"})
    assert changed.name.startswith("small-images-")
    assert changed.precision == "bfloat16"
    short = protocol(
        protocol="vit-paper-transfer", overrides={"protocol.total_steps": 200, "protocol.warmup_steps": 20}
    )
    assert {(size.total_steps, size.warmup_steps) for size in (short, *short.larger)} == {((200,), 20)}
    assert [size.learning_rates for size in short.larger] == [
        s.learning_rates for s in protocol_named("vit-paper-transfer").larger
    ]
    with pytest.raises(ValueError, match=r"'recipe\.seed' cannot be overridden in an evaluation"):
        protocol(overrides={"recipe.seed": 1})
    with pytest.raises(ValueError, match=r"'protocol\.name' cannot be overridden"):
        protocol(overrides={"protocol.name": "mine"})
    with pytest.raises(ValueError, match="knn trains no network, so there is none to train from scratch"):
        protocol(protocol="knn", from_scratch=True)
    with pytest.raises(ValueError, match=r"No task of VTAB is prepared below .*vitline vtab prepare"):
        protocol(tasks=("vtab",))


@pytest.fixture
def prepare(digits_root, tmp_path):
    """prepare(**fields): the config of a form with these fields; the default source is a folder with one file."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"no picture yet")

    def make(**fields):
        return resolve_prepare(digits_root, PrepareRequest(**{"source": str(tmp_path), "name": "cats"} | fields))

    return make


def test_a_source_of_any_kind_takes_its_fields_as_overrides(prepare, tmp_path):
    (tmp_path / "t.csv").write_text("image,tags\na.jpg,cat\n")
    overrides = {"source.labels_column": "tags", "recipe.val_per_class": 5, "execution.examples_per_chunk": 7}
    table = prepare(kind="table", source=str(tmp_path / "t.csv"), near_duplicates="drop", overrides=overrides)
    assert (table.source.kind, table.source.labels_column) == ("table", "tags")
    assert (table.recipe.near_duplicates, table.recipe.val_per_class) == ("drop", 5)
    assert table.execution.examples_per_chunk == 7
    assert prepare(decontaminate=("digits",)).recipe.decontaminate == ("digits",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": None}, "name is empty; a corpus made from .* needs one"),
        ({"preset": "digits"}, "Both a preset, digits, and a source, .*, were given"),
        ({"source": None}, "Neither a preset nor a source was given"),
        ({"source": None, "preset": "digits"}, "name is a field for a source of your own, but preset 'digits' was given"),
        ({"source": "/not/there"}, "The source /not/there does not exist"),
        ({"source": "memory://nothing/here"}, "memory://nothing/here holds no objects"),
        ({"kind": "arrays"}, "needs source.layout, one of cifar10, cifar100, .*--set source.layout=VALUE"),
        ({"overrides": {"source.lynks": "skip"}}, r"no field 'source\.lynks'; available fields: kind, links, path"),
        ({"overrides": {"recipe.order_sed": 1}}, r"no field 'recipe\.order_sed'; available fields: .*order_seed"),
        ({"overrides": {"source.path": "/tmp"}}, "'source.path' cannot be overridden: the form's own fields determine it"),
        ({"overrides": {"recipe.class_map": "imagenet21"}}, "imagenet21k-p"),
        ({"decontaminate": ("pets",)}, "There is no corpus 'pets' below .*; there are: digits"),
        ({"add_to": "digits"}, "add_to 'digits' names no version"),
        ({"add_to": "digits/0123456789ab"}, "There is no corpus 'digits/0123456789ab' below"),
    ],
)  # fmt: skip
def test_an_impossible_preparation_is_refused_in_one_sentence(prepare, fields, says):
    with pytest.raises(ValueError, match=says) as refused:
        prepare(**fields)
    assert "\n" not in str(refused.value)


def test_an_addition_has_the_name_of_its_corpus_and_must_match_it(prepare, digits):
    version = digits.uri.rpartition("/")[2]
    added = prepare(name=None, add_to=f"digits/{version}")
    assert (added.name, added.add_to) == ("digits", f"digits/{version}")
    with pytest.raises(ValueError, match=r"recipe\.order_seed: the request has 1, but .* has 0"):
        prepare(name=None, add_to=f"digits/{version}", overrides={"recipe.order_seed": 1})
