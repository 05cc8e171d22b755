"""Forms of fine-tunings resolved to configs: fields of a protocol, steps and warmup, overrides."""

import pytest

from vitline.data_prep.decode import DecodePolicy
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.forms import FinetuneRequest
from vitline.flows.plans.training_cost import training_cost
from vitline.flows.plans.training_plan import training_plan
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish


def test_the_model_must_exist(digits_root):
    with pytest.raises(ValueError, match=r"'emoji' is not a published model .*none yet"):
        resolve_finetune(digits_root, FinetuneRequest(model="emoji", corpus="digits"))


def test_more_workers_than_lanes_are_refused_unless_an_override_makes_more_lanes(digits_root, tiny):
    fields = {"model": tiny, "corpus": "digits", "global_batch_size": 48, "num_workers": 24}
    more = FinetuneRequest(**fields, overrides={"recipe.input.num_lanes": 24})
    assert resolve_finetune(digits_root, more).config.execution.num_workers == 24
    fewer = FinetuneRequest(**fields, overrides={"recipe.input.num_lanes": 16})
    with pytest.raises(ValueError, match=r"num_workers=24 is more than recipe\.input\.num_lanes=16"):
        resolve_finetune(digits_root, fewer)


def test_a_finetuning_takes_the_fields_of_a_protocol_that_the_request_leaves_out(digits_root, tiny):
    def recipe(**fields):
        return resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", **fields)).config.recipe

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
    with pytest.raises(ValueError, match=r"chooses peak_lr among 0\.001, 0\.003, 0\.01, 0\.03: set it"):
        recipe(protocol="vit-paper-transfer")
    with pytest.raises(ValueError, match=r"chooses steps among 1,000, 10,000: set it to one"):
        recipe(protocol="vit-paper-v1", peak_lr=0.01)


def test_a_finetuning_takes_the_settings_of_a_protocol_of_a_user_and_those_of_overrides(digits_root, tiny, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: vit-paper\nprotocol: {image_size_px: 16, optim: {layer_decay: 0.75, head_first_steps: 100}}\n"
    )
    overrides = {"protocol": str(path), "recipe.optim.weight_decay": 0.05, "recipe.optim.frozen": 1}
    request = FinetuneRequest(model=tiny, corpus="digits", overrides=overrides)
    recipe = resolve_finetune(digits_root, request).config.recipe
    optim = recipe.optim
    assert (optim.optimizer, optim.layer_decay, optim.head_first_steps, optim.frozen) == ("sgd", 0.75, 100, 1)
    assert (optim.weight_decay, recipe.total_steps, recipe.model.image_size_px) == (0.05, 2500, 16)


def test_a_finetuning_takes_an_optimizer_by_its_import_path_and_refuses_wrong_options(digits_root, tiny):
    def resolved(**optim):
        overrides = {f"recipe.optim.{name}": value for name, value in optim.items()}
        return resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", overrides=overrides))

    muon = {"optimizer": "torch.optim:Muon", "optimizer_scope": "hidden-matrices"}
    training = resolved(**muon, **{"optimizer_options.ns_steps": 4})
    assert training.config.recipe.optim.optimizer_options == {"ns_steps": 4}
    assert "moments" in training_plan(training)["memory"]
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'steps'\. Correct the options"):
        resolved(**muon, **{"optimizer_options.steps": 4})


def test_fewer_steps_shorten_the_warmup_of_a_protocol_and_overrides_take_precedence(digits_root, tiny):
    def plan(protocol, steps, **overrides):
        fields = {"protocol": protocol, "steps": steps, "peak_lr": 0.01, "image_size_px": 16, "overrides": overrides}
        recipe = resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", **fields)).config.recipe
        return recipe.total_steps, recipe.optim.warmup_steps

    for protocol, steps, warmup in [
        ("vit-paper-transfer", 500, 100),  # its own
        ("vit-paper-transfer", 499, 99),
        ("vit-paper-transfer", 100, 20),  # as many steps as the protocol's own warmup
        ("vit-paper-transfer", 1, 0),
        ("vit-paper-transfer", 5000, 100),
        ("vit-paper-v1", 500, 100),  # chooses between 1,000 and 10,000 steps, with 200 of warmup
        ("four-settings", 10, 0),
    ]:
        assert plan(protocol, steps) == (steps, warmup)
    assert plan("vit-paper-transfer", 100, **{"recipe.optim.warmup_steps": 99}) == (100, 99)
    assert plan("vit-paper-transfer", 100, **{"recipe.total_steps": 10, "recipe.optim.warmup_steps": 9}) == (10, 9)
    with pytest.raises(ValueError, match=r"optim\.warmup_steps=100 must be less than total_steps=100"):
        plan("vit-paper-transfer", 100, **{"recipe.optim.warmup_steps": 100})


@pytest.mark.parametrize("protocol", [None, "vit-paper"])
def test_several_labels_per_image_take_the_sigmoid_loss_and_refuse_softmax(tagged, digits_root, tiny, protocol):
    def training(**overrides):
        fields = {"model": tiny, "corpus": tagged.uri, "protocol": protocol, "global_batch_size": 8}
        return resolve_finetune(digits_root, FinetuneRequest(**fields, overrides=overrides))

    recipe = training().config.recipe
    assert (recipe.loss, recipe.model.head_bias_init) == ("sigmoid", -1.1)  # a quarter for each of 4 classes
    assert training_cost(training())["loss"] == "sigmoid, for several labels per image"
    with pytest.raises(
        ValueError, match=r"several labels per image, but the training 'tagged-finetune' uses a softmax loss"
    ):
        training(**{"recipe.loss": "softmax"})


@pytest.mark.parametrize(
    ("own", "at_384"),
    [
        ({"eval_resize": "shorter_side", "eval_resize_px": 256}, {"eval_resize_px": 439}),
        ({"train_crop": "random", "train_resize_px": 256}, {"train_resize_px": 439}),
    ],
)
def test_sizes_before_a_crop_scale_with_the_image_size(digits_root, tmp_path, own, at_384):
    augment = AugmentConfig(image_size_px=224, **own)
    network = ViTConfig(image_size_px=224, patch_size_px=32, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=augment)
    model = publish(open_store(str(tmp_path)), "cropped", "1", build_network(network, 2), contract, ["a", "b"], {})

    def finetuned(**fields):
        request = FinetuneRequest(model=model, corpus="digits", **fields)
        return resolve_finetune(digits_root, request).config.recipe.input.augment

    assert finetuned() == augment
    assert finetuned(image_size_px=384) == replace(augment, image_size_px=384, **at_384)
