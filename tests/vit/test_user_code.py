"""User-defined networks and losses: what their code must be, what a run keeps of it, and where it is refused."""

import pytest
import torch

from vitline.flows.forms.user_code import with_user_code
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.cost.memory import activation_bytes
from vitline.vit.models.build import build_network
from vitline.vit.models.config import UserNetworkConfig, network_config
from vitline.vit.models.flops import forward_flops
from vitline.vit.models.recompute import blocks_of
from vitline.vit.models.user_code import check_source, source_digest
from vitline.vit.published.model_record import CARD, file_key, published_record
from vitline.vit.published.models import adapt, load_model
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.loss import loss_named, softmax_cross_entropy
from vitline.vit.training.world import World

from ..trainings import losses_of

NETS = """
import torch
from torch import nn
from vitline.vit.models.network import Network, normalised

class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x).sin().relu()

class Crow(Network):
    block_types = (Layer,)

    def __init__(self, config, num_classes):
        super().__init__()
        width = config.settings["width"]
        self.register_buffer("shift", torch.full((1,), 0.5), persistent=False)
        self.pool = nn.AvgPool2d(config.image_size_px // 4)
        self.layers = nn.Sequential(Layer(48, width), Layer(width, width))
        self.head = nn.Linear(width, num_classes)

    def features(self, images):
        return self.layers(self.pool(normalised(images)).flatten(1) + self.shift)

class HeadOfOneClass(Crow):
    def __init__(self, config, num_classes):
        super().__init__(config, 1)

def text(config, num_classes):
    return "crow"

def fails(config, num_classes):
    raise KeyError("width")
"""
LOSSES = """
import torch.nn.functional as F

def same(logits, targets):
    return -(targets * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)

def mean(logits, targets):
    return same(logits, targets).mean()
"""

OPTIMIZERS = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, scale):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "scale": scale})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                    p.add_(p.grad.sign(), alpha=-group["scale"] * group["lr"])
"""


@pytest.fixture(autouse=True)
def package(own_lab):
    loss_named.cache_clear()
    return own_lab(nets=NETS, losses=LOSSES, optimizers=OPTIMIZERS)


CROW = UserNetworkConfig(network="own_lab.nets:Crow", image_size_px=16, settings={"width": 24})


@pytest.fixture
def config(train_config):
    whole = replace(train_config("crows", steps=6, save_every_steps=3), **{"recipe.model": CROW})
    return replace(whole, **{"recipe.loss": "own_lab.losses:same"})


def test_a_plan_holds_the_digest_of_the_code_and_what_was_measured_of_the_network(config, package):
    planned = with_user_code(config)
    model = planned.recipe.model
    assert (model.source, planned.recipe.loss_source) == (source_digest("own_lab:x"),) * 2
    assert (model.embed_dim, model.feature_flop) == (24, 2 * (48 * 24 + 24 * 24))
    assert forward_flops(model, 10) == model.feature_flop + 2 * 24 * 10
    assert with_user_code(planned) == planned
    assert network_config(model.model_dump(mode="json")) == model
    assert model.for_transfer(32).feature_flop == 4 * model.feature_flop
    (package / "more.py").write_text("")
    assert with_user_code(config).config_digest != planned.config_digest
    with pytest.raises(ValueError, match=r"'own_lab' are others .* Restore that version"):
        with_user_code(planned)


def test_a_run_trains_the_network_with_the_loss_and_publishes_a_model_that_can_be_loaded(config, finished):
    run = finished(with_user_code(config))
    assert len(losses_of(run)) == 6
    model = load_model(run.read_json("state.json")["model"])
    logits = model.network(torch.zeros(2, 3, 16, 16))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    larger = model.network.config.for_transfer(32)
    assert adapt(model.network, larger, 3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    published = open_store(model.uri)
    assert "VITLINE_RECIPE_PACKAGES=own_lab" in published.read(file_key(published_record(published), CARD)).decode()


def test_a_run_whose_code_has_changed_fails_with_both_digests(config, start, package):
    run, attempt = start(with_user_code(config))
    (package / "nets.py").write_text(NETS.replace("0.5", "0.6"))
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    assert "own_lab" in run.read_json("state.json")["reason"]


def test_a_run_trains_with_an_optimizer_and_resumes_with_the_same_code_only(config, start, stop_at, package):
    optim = {"optimizer": "own_lab.optimizers:Signs", "optimizer_options": {"scale": 0.1}}
    config = replace(
        config, **{"recipe.loss": "softmax"}, **{f"recipe.optim.{name}": value for name, value in optim.items()}
    )
    planned = with_user_code(config)
    assert planned.recipe.optim.optimizer_source == source_digest("own_lab:x")
    whole, attempt = start(planned)
    assert TrainingRun(whole, attempt, World()).execute() == "finished"
    resumed, attempt = start(replace(planned, name="resumed"))
    stop_at(4, resumed, attempt)
    resumed, attempt = start(replace(planned, name="resumed"), resumed)
    assert TrainingRun(resumed, attempt, World()).execute() == "finished"
    assert losses_of(resumed) == losses_of(whole)
    (package / "optimizers.py").write_text(OPTIMIZERS.replace("sign()", "sin()"))
    run, attempt = start(replace(planned, name="other-code"))
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    assert "those that the optimizer 'own_lab.optimizers:Signs' was made with" in run.read_json("state.json")["reason"]
    with pytest.raises(ValueError, match=r"missing 1 required positional argument: 'scale'\. Correct the options"):
        with_user_code(replace(config, **{"recipe.optim.optimizer_options": {}}))


def test_the_same_loss_as_code_of_others_gives_the_same_losses():
    logits, targets = torch.randn(4, 3), torch.eye(4, 3)
    assert torch.equal(loss_named("own_lab.losses:same")(logits, targets), softmax_cross_entropy(logits, targets))


def test_a_loss_that_is_not_one_number_an_example_is_refused():
    with pytest.raises(
        ValueError, match=r"'own_lab.losses:mean' returned \(\); it must return one loss per example, \(4,\)"
    ):
        loss_named("own_lab.losses:mean")(torch.randn(4, 3), torch.eye(4, 3))


def test_blocks_of_others_are_checkpointed_and_their_memory_is_counted():
    network = build_network(CROW, 10)
    assert [type(block).__name__ for block in blocks_of(network)] == ["Layer", "Layer"]
    assert activation_bytes(CROW, 4) > activation_bytes(CROW, 4, checkpointing="full") > 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("HeadOfOneClass", r"returned HeadOfOneClass\. It must return a subclass .*Linear of 2 classes"),
        ("text", "returned str"),
        ("fails", "'own_lab.nets:fails' failed: KeyError: 'width'"),
        ("Craw", "has no function 'Craw'. Did you mean 'Crow'"),
    ],
)
def test_what_is_no_network_is_refused(name, error):
    with pytest.raises(ValueError, match=error):
        build_network(replace(CROW, network=f"own_lab.nets:{name}"), 2)


def test_a_plan_refuses_what_is_no_network(config):
    with pytest.raises(ValueError, match=r"returned str\. It must return a subclass"):
        with_user_code(replace(config, **{"recipe.model.network": "own_lab.nets:text"}))


def test_code_of_packages_that_are_not_listed_is_never_imported(config, monkeypatch, start):
    planned = with_user_code(config)
    run, attempt = start(planned)
    TrainingRun(run, attempt, World()).execute()
    monkeypatch.setenv("VITLINE_RECIPE_PACKAGES", "other")
    loss_named.cache_clear()
    with pytest.raises(ValueError, match=r"code of 'own_lab', which may not be imported here\. Add the package"):
        with_user_code(planned)
    with pytest.raises(Exception, match=r"code of 'own_lab', which may not be imported here"):
        load_model(run.read_json("state.json")["model"])
    with pytest.raises(ValueError, match="code of 'os'"):
        build_network(UserNetworkConfig(network="os:abort"), 2)
    with pytest.raises(ValueError, match="code of 'os'"):
        loss_named("os:abort")


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("VITLINE_RECIPE_PACKAGES", "own_owls")
    with pytest.raises(ValueError, match="There is no Python package 'own_owls' here"):
        check_source("own_owls.nets:Owl", "0" * 64, "network")
