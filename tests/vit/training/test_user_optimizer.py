"""Optimizers by their import path: as torch's own class by hand, resumed bit for bit, their memory counted, and what is refused."""

import pytest
import torch
from torch import Tensor

from vitline.infra.config import digest_of, replace
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import Retention
from vitline.vit.checkpoints.restore import resume, rewind
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.config import OptimConfig, TrainConfig
from vitline.vit.cost.memory import num_weights
from vitline.vit.cost.training_memory import moment_bytes
from vitline.vit.cost.user_optimizer import tried
from vitline.vit.models.config import BiTConfig
from vitline.vit.models.network import normalised
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.loss import softmax_cross_entropy, targets_of
from vitline.vit.training.optim import is_decayed, set_lr, step_where_finite
from vitline.vit.training.schedule import lr_at
from vitline.vit.training.world import World

from ..unleased import Unleased

CPU = World()
ADAFACTOR = {"optimizer": "torch.optim:Adafactor", "optimizer_options": {"d": 2.0, "eps": [None, 0.01]}}
MUON = {
    "optimizer": "torch.optim:Muon",
    "optimizer_scope": "hidden-matrices",
    "optimizer_options": {"adjust_lr_fn": "match_rms_adamw"},
}
COUNTING = {"optimizer": "own_lab.optimizers:Counting", "weight_decay": 0.0}
OPTIMIZERS = """
import torch

class Counting(torch.optim.Optimizer):
    '''Signs of gradients, as small as the number of steps is large.'''

    def __init__(self, params, lr, power=0.5):
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                    p.add_(p.grad.sign(), alpha=-group["lr"] / self.state[p]["seen"] ** group["power"])

class Annealing(Counting):
    def step(self):
        super().step()
        for group in self.param_groups:
            group["power"] *= 0.5

class Listing(Counting):
    def step(self):
        super().step()
        for of in self.state.values():
            of["all"] = [of["seen"]]

class Together(Counting):
    def step(self):
        super().step()
        self.state["all"]["seen"] = 1

def function(params, lr):
    return Counting(params, lr)
"""


@pytest.fixture(autouse=True)
def package(own_lab):
    return own_lab(optimizers=OPTIMIZERS)


def trained(recipe, make_batch, steps, state=None):
    state = state or initial_state(recipe, 5, CPU.device)
    losses = [
        float(train_step(state, state.model, [make_batch(step)], recipe, CPU).loss_sum)
        for step in range(state.step, steps)
    ]
    return state, losses


SHARES = {"patch_embed": 0.125, "cls_token": 0.125, "pos_embed": 0.125, "blocks.0": 0.25, "blocks.1": 0.5}


def group_of(name, parameter):
    """A parameter group by hand: a decay of the learning rate of one half from layer to layer, weight decay of matrices."""
    share = next((share for start, share in SHARES.items() if name.startswith(start)), 1.0)
    decay = 0.1 if name.endswith("weight") and parameter.ndim > 1 else 0.0
    return {"params": [parameter], "share": share, "weight_decay": decay}


def by_hand(optim, model):
    """Torch's optimizers for the same weights."""
    named = dict(model.named_parameters())
    matrices = {n for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2} if optim is MUON else set()
    assert optim is not MUON or len(matrices) == 2 * 4
    if optim is ADAFACTOR:
        return [torch.optim.Adafactor([group_of(*each) for each in named.items()], d=2.0, eps=(None, 0.01))]
    groups = [[group_of(n, p) for n, p in named.items() if (n in matrices) == of] for of in (True, False)]
    return [
        torch.optim.Muon(groups[0], adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups[1], eps=1e-3, fused=True),
    ]


@pytest.mark.parametrize("optim", [ADAFACTOR, MUON])
def test_losses_are_those_of_torchs_own_class_by_hand(changed, make_batch, optim):
    # With a small epsilon AdamW's step would be the sign of rounding noise, for keys' biases, which have no gradient.
    more = {"eps": 1e-3} if optim is MUON else {}
    recipe = changed(layer_decay=0.5, clip_norm=None, **optim, **more)
    state, losses = trained(recipe, make_batch, 6)
    model, expected = initial_state(recipe, 5, CPU.device).model, []
    optimizers = by_hand(optim, model)
    for step in range(6):
        batch = make_batch(step)
        losses_of = softmax_cross_entropy(model(normalised(batch.images)), targets_of(batch.labels, 5))
        (losses_of.sum() / 8).backward()
        expected.append(float(losses_of.detach().sum()))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step + 1, recipe.optim, 12) * group["share"]
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(trained(changed(layer_decay=0.5), make_batch, 6)[1], rel=1e-3)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            dict(state.model.named_parameters())[name].detach(), p.detach(), rtol=1e-3, atol=1e-4
        )


def test_what_is_no_matrix_of_a_block_is_trained_by_adamw(changed):
    state = initial_state(changed(**MUON, frozen="embeddings"), 5, CPU.device)
    named = {parameter: name for name, parameter in state.model.named_parameters()}
    muon, adamw = ({named[p] for group in part.param_groups for p in group["params"]} for part in state.optimizer.parts)
    assert {name.split(".", 2)[-1] for name in muon} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "fc1.weight",
        "fc2.weight",
    }
    assert {"head.weight", "head.bias", "norm.weight", "blocks.0.fc1.bias"} < adamw
    assert all(name.startswith(("blocks", "norm", "head")) for name in adamw)
    assert all(is_decayed(name, dict(state.model.named_parameters())[name]) for name in muon)


META = {"run_key": "r", "recipe": {}, "config_digest": "", "corpus_digest": "", "class_map_digest": ""}


@pytest.mark.parametrize("optim", [ADAFACTOR, {**MUON, "frozen": 1}, COUNTING])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_training_resumed_from_a_checkpoint_equals_the_uninterrupted_one(changed, make_batch, tmp_path, optim, at):
    recipe, run = changed(**optim, head_first_steps=3), open_store(str(tmp_path / "run"))
    whole, _ = trained(recipe, make_batch, 6)
    saver = CheckpointSaver(Unleased(run, 1), CPU, Retention(1))
    saver.save(trained(recipe, make_batch, at)[0], {**META, "save_id": "1", "images_seen": 0})
    saver.wait()
    resumed = initial_state(recipe, 5, CPU.device)
    resume(run, resumed, META, CPU)
    assert resumed.step == at
    trained(recipe, make_batch, 6, resumed)
    for (name, expected), (_, found) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name
        moments, others = resumed.optimizer.state.get(found, {}), whole.optimizer.state.get(expected, {})
        assert {k: type(v) for k, v in moments.items()} == {k: type(v) for k, v in others.items()}
        assert all(torch.equal(torch.as_tensor(moments[k]), torch.as_tensor(v)) for k, v in others.items()), name


@pytest.mark.parametrize("optim", [MUON, COUNTING])
def test_a_training_that_went_back_before_its_first_checkpoint_equals_a_new_one(changed, make_batch, tmp_path, optim):
    recipe, run = changed(**optim), open_store(str(tmp_path / "run"))
    state, losses = trained(recipe, make_batch, 4)
    limits = {"loss": 9.0, "loss_limit": 1.0, "grad_norm": 1.0, "grad_norm_limit": 2.0}
    state.guard.spikes.append({"step": 4, "first": 1, "last": 4, **limits})
    rewind(run, state, lambda: initial_state(recipe, 5, CPU.device), CPU)
    assert state.step == 0
    assert trained(recipe, make_batch, 4, state)[1] == losses


@pytest.mark.parametrize("optim", [ADAFACTOR, MUON])
def test_a_step_that_is_not_finite_changes_nothing(changed, make_batch, optim):
    results = []
    for planted in ((), (torch.nan,)):
        state = initial_state(changed(**optim), 5, CPU.device)
        set_lr(state.optimizer, 0.1)
        for value in (*planted, 1.0, *planted, 2.0):
            for parameter in state.model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            step_where_finite(state.optimizer, torch.tensor(value == value))
        results.append([p.detach() for p in state.model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize(
    "optim", [ADAFACTOR, {**MUON, "frozen": 1}, {"optimizer": "torch.optim:Adam"}, {"optimizer": "torch.optim:SGD"}]
)
def test_the_memory_of_a_plan_is_that_of_the_state(changed, make_batch, optim):
    recipe = changed(**optim)
    state, _ = trained(recipe, make_batch, 1)
    kept = [
        value.nbytes
        for of in state.optimizer.state.values()
        for name, value in of.items()
        if isinstance(value, Tensor) and name != "step"
    ]
    counts = 4 * sum("step" in of for of in state.optimizer.state.values())
    assert sum(kept) <= moment_bytes(recipe, num_weights(recipe.model, 5)) <= sum(kept) + counts


OF_LAB = "own_lab.optimizers"


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({"optimizer": "torch.optim:Adafactr"}, "has no function 'Adafactr'. Did you mean 'Adafactor'"),
        ({"optimizer": f"{OF_LAB}:function", "weight_decay": 0.0}, "no subclass of torch.optim.Optimizer but <function"),
        ({"optimizer": "own_lab.none:Muon"}, "'own_lab.none:Muon' cannot be imported: ModuleNotFoundError"),
        ({"optimizer": "os:abort"}, "code of 'os', which may not be imported here. Add the package"),
        ({**ADAFACTOR, "optimizer_options": {"decay": 1}}, "unexpected keyword argument 'decay'. Correct the options"),
        ({**ADAFACTOR, "optimizer_options": {"d": 0.5}}, "ValueError: Clipping threshold d should be >= 1 but is: 0.5"),
        ({"optimizer": "torch.optim:Muon"}, "Muon only supports 2D .* or set optimizer_scope=hidden-matrices for"),
        ({"optimizer": "torch.optim:LBFGS", "weight_decay": 0.0}, "not supported: .*'torch.optim:LBFGS' cannot take a step"),
        ({"optimizer": f"{OF_LAB}:Counting"}, "has no weight_decay, so 0.1 has no effect. Set it to 0"),
        ({"optimizer": f"{OF_LAB}:Annealing", "weight_decay": 0.0}, "keeps 'power' in its parameter groups, which check"),
        ({"optimizer": f"{OF_LAB}:Listing", "weight_decay": 0.0}, "keeps list 'all', which checkpoints would not hold"),
        ({"optimizer": f"{OF_LAB}:Together", "weight_decay": 0.0}, r"keeps state\['all'\], which checkpoints would not"),
    ],
)  # fmt: skip
def test_what_cannot_train_a_network_is_refused(changed, optim, says):
    recipe = changed(**optim)
    with pytest.raises(ValueError, match=says):
        tried(recipe.model, recipe.optim, 5)


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ({"optimizer": "muon"}, "must be 'adamw', 'sgd', or a class as PACKAGE.MODULE:NAME"),
        ({"optimizer_options": {"d": 1}}, r"optimizer_options=\{'d': 1\} has no effect with optimizer='adamw'"),
        ({"optimizer_scope": "hidden-matrices"}, "optimizer_scope='hidden-matrices' has no effect with optimizer='adamw'"),
        ({**ADAFACTOR, "beta2": 0.95}, "beta2=0.95 has no effect with optimizer='torch.optim:Adafactor'"),
        ({**ADAFACTOR, "optimizer_options": {"lr": 1}}, "optimizer_options has 'lr', which the learning rate of the recipe sets"),
        ({**MUON, "frozen": "backbone"}, "needs a Vision Transformer or a hybrid with blocks that are trained"),
        ({**MUON, "frozen": 2}, "blocks that are trained, not a Vision Transformer .* with optim.frozen=2"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(changed, optim, says):
    with pytest.raises(ValueError, match=says):
        changed(**optim)


def test_matrices_need_blocks_and_a_class_needs_whole_weights(changed):
    with pytest.raises(ValueError, match="blocks that are trained, not a BiT ResNet"):
        replace(changed(), model=BiTConfig(image_size_px=8), **{f"optim.{name}": value for name, value in MUON.items()})
    config = TrainConfig(name="n", corpus="c", recipe=changed(**ADAFACTOR))
    with pytest.raises(
        ValueError, match=r"not supported: execution\.sharding=fsdp with recipe\.optim\.optimizer=torch\.optim:"
    ):
        replace(config, **{"execution.sharding": "fsdp"})


def test_defaults_change_no_digest_and_options_do(changed):
    assert not {"optimizer_options", "optimizer_scope", "optimizer_source"} & OptimConfig().model_dump().keys()
    recipe = changed(**ADAFACTOR)
    same = replace(changed(optimizer=ADAFACTOR["optimizer"]), **{
        f"optim.optimizer_options.{name}": value for name, value in ADAFACTOR["optimizer_options"].items()
    })  # fmt: skip
    assert digest_of(same) == digest_of(recipe) != digest_of(changed(optimizer=ADAFACTOR["optimizer"]))
