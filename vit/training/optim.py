"""Parameter groups and optimizers: AdamW, SGD, and those of a user, or of torch, by their import path (docs/guides/own-recipes.md)."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vitline.vit.config import OptimConfig, UpdateConfig
from vitline.vit.models.network import Network
from vitline.vit.models.user_code import check_source, imported_where_allowed, is_reference
from vitline.vit.training.layers import is_hidden_matrix, lr_share

T = TypeVar("T", bound=torch.optim.Optimizer)
Groups = list[dict[str, Any]]
"""Parameter groups of torch, each with `lr_share` and `weight_decay`."""

# Not decayed although they have two or more dimensions: the paper's code decays only names that end in "/kernel".
TOKENS, TABLES = ("cls_token", "probe", "mask_token"), "pos_embed"


def uncompiled(kind: type[T]) -> type[T]:
    """The optimizer `kind` with the same arithmetic, for steps outside of torch.compile.

    Methods of torch's optimizers load its compiler (torch._dynamo) when they are first called, to keep them apart from compiled
    code: 1.7 CPU-seconds and 80 MB in every process that trains. vitline compiles networks, never steps.
    """
    step = inspect.unwrap(kind.step)

    def plain_step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            return step(self, closure)

    apart = {
        name: inspect.unwrap(method)
        for name, method in vars(torch.optim.Optimizer).items()
        if inspect.isfunction(method) and method.__code__.co_filename == torch._compile.__file__
    }
    return cast(type[T], type(kind.__name__, (kind,), {**apart, "step": plain_step, "__module__": __name__}))


AdamW, SGD = uncompiled(torch.optim.AdamW), uncompiled(torch.optim.SGD)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """True for matrices and convolutions, False for biases, norms, learned tokens and position embeddings."""
    leaf = name.rsplit(".", 1)[-1]
    return parameter.ndim >= 2 and leaf not in TOKENS and not leaf.startswith(TABLES)


def parameter_groups(
    model: nn.Module, config: UpdateConfig, chosen: Callable[[str, Tensor], bool] = lambda name, parameter: True
) -> Groups:
    """The chosen ones of the weights that are trained, grouped by weight decay and share of the learning rate."""
    groups = defaultdict[tuple[float, float], list[Tensor]](list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and chosen(name, parameter):
            decay = config.weight_decay if is_decayed(name, parameter) else 0.0
            groups[lr_share(name, model, config.layer_decay), decay].append(parameter)
    return [{"params": found, "lr_share": share, "weight_decay": decay} for (share, decay), found in groups.items()]


def split_groups(model: nn.Module, config: UpdateConfig) -> tuple[Groups, Groups]:
    """The groups of a user-defined optimizer, and those that AdamW trains beside it, by `config.optimizer_scope`."""
    if config.optimizer_scope == "all":
        return parameter_groups(model, config), []
    assert isinstance(model, Network)
    network = model.config

    def is_hidden(name: str, parameter: Tensor) -> bool:
        return is_decayed(name, parameter) and is_hidden_matrix(name, parameter, network)

    def is_other(name: str, parameter: Tensor) -> bool:
        return not is_hidden(name, parameter)

    return parameter_groups(model, config, is_hidden), parameter_groups(model, config, is_other)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the weights that have gradients. `set_lr` sets its rate at every step. Raises ValueError for a user-defined one
    that cannot be used, or whose code has changed since the training was planned."""
    if not is_reference(config.optimizer):
        groups = parameter_groups(model, config)
        return sgd(groups, config) if config.optimizer == "sgd" else adamw(groups, config)
    if config.optimizer_source:
        check_source(config.optimizer, config.optimizer_source, "optimizer")
    groups, others = split_groups(model, config)
    chosen = user_optimizer(groups, config)
    return SplitOptimizer(chosen, adamw(others, config)) if others else chosen


# Both have all their moments from the beginning: a first step that is not applied, or trains the head only, would leave some out.
def sgd(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    made = SGD(groups, lr=config.peak_lr, momentum=config.beta1, fused=True)
    for parameter in parameters_of(groups):
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def adamw(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    # The fused kernel makes a ViT-B step at small batches 1.1 to 1.2 x faster than foreach, on the CPU too.
    made = AdamW(groups, lr=config.peak_lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for parameter in parameters_of(groups):
        made.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return made


def user_optimizer(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.optimizer` with the options of the recipe, for the weights of these groups.

    Raises ValueError for code that may not be imported, for what is no optimizer, and for options that it does not take.
    """
    name, options = config.optimizer, config.optimizer_options
    kind = imported_where_allowed(name, "optimizer")
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ValueError(
            f"The optimizer {name!r} is no subclass of torch.optim.Optimizer but {kind!r:.80}. Name a class, such as torch.optim:Adafactor."
        )
    try:
        made = kind(groups, lr=config.peak_lr, **options)  # type: ignore[call-arg]  # subclasses take a rate
    except Exception as error:
        of_matrices = ", or set optimizer_scope=hidden-matrices for a class of matrices, such as torch.optim:Muon"
        raise ValueError(
            f"The optimizer {name!r} with optimizer_options={options} failed: {one_line(error)}. Correct the options"
            f"{of_matrices if config.optimizer_scope == 'all' else ''}."
        ) from error
    if config.weight_decay and "weight_decay" not in made.defaults:
        raise ValueError(
            f"The optimizer {name!r} has no weight_decay, so {config.weight_decay} has no effect. Set it to 0."
        )
    return made


def one_line(error: Exception) -> str:
    """An error of user code as part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


class SplitOptimizer(torch.optim.Optimizer):
    """A user-defined optimizer of some weights, and another one of all others, as one with common groups and state."""

    def __init__(self, chosen: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        super().__init__([*chosen.param_groups, *other.param_groups], {})
        self.parts = chosen, other
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def parameters_of(groups: Groups) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def is_built_in(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of vitline's: it has all its moments from the beginning, and can skip a step on the device."""
    return isinstance(optimizer, AdamW | SGD)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_share"]


def step_where_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """One step of an optimizer of `build_optimizer` where `finite`, 0-d on the device, is true; else it changes nothing.

    The fused kernels decide that on the device, by the attribute that torch's GradScaler sets, so that the host need not wait. For a
    user-defined optimizer, which may not know it, it waits.
    """
    if is_built_in(optimizer):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()
