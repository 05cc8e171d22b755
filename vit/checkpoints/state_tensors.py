"""The tensors of a TrainState by name, as checkpoints hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitline.vit.checkpoints.manifest import CannotResume, CheckpointRef, WeightsError
from vitline.vit.checkpoints.read import Held
from vitline.vit.checkpoints.tensor_file import TensorPiece
from vitline.vit.training.loop import TrainState
from vitline.vit.training.optim import is_built_in
from vitline.vit.training.sharding.slices import fill, is_dtensor, local_shard, sliced_like

_NUMBER = ":number"
"""Ends the name of a moment that is a number in Python, such as the count of steps of many user-defined optimizers."""


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """Every tensor of the state by name: model/, average/, optim/<parameter>/<moment>. Numbers of an optimizer are 0-d tensors.

    Names come from `named_parameters`, not from the optimizer's integer ids, which depend on the parameter groups.
    """
    tensors = {f"model/{name}": value for name, value in state.model.state_dict().items()}
    tensors |= {f"average/{name}": value for name, value in (state.average or {}).items()}
    for name, parameter in state.model.named_parameters():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optim/{name}/{moment}"] = value
            else:
                kind = torch.float64 if isinstance(value, float) else torch.int64
                tensors[f"optim/{name}/{moment}{_NUMBER}"] = torch.tensor(value, dtype=kind)
    return tensors


def local_rows(state: TrainState) -> Held:
    """Of a network that is split over the ranks, the rows that this one holds; of any other, whole tensors.

    The function raises CannotResume for a tensor of another shape than that of the state: the checkpoint is not damaged.
    """
    kept = {f"model/{name}": value for name, value in state.model.state_dict().items()}
    kept |= {f"average/{name}": value for name, value in (state.average or {}).items()}
    kept |= {f"optim/{name}": parameter for name, parameter in state.model.named_parameters()}
    own = {name: local_shard(value) for name, value in kept.items() if is_dtensor(value)}

    def held(piece: TensorPiece) -> range | None:
        of_optimizer = piece["name"].startswith("optim/")
        found = own.get(piece["name"].rpartition("/")[0] if of_optimizer else piece["name"])
        if found is None:
            return None
        local, place = found
        if (shape := tuple(piece["global_shape"])) != place.shape:
            if of_optimizer:  # such as Adam's step counter
                return None
            raise CannotResume(_other_shape(piece["name"], shape, place.shape))
        return range(place.offsets[0], place.offsets[0] + local.shape[0])

    return held


def _other_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {found} in the checkpoint, but {expected} in the model. The checkpoint belongs to another network; start a "
        "new run."
    )


def load_state_tensors(state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `state_tensors`, in place; of a tensor that is split over the ranks, `tensors` may have the own rows only. Raises
    WeightsError for a missing or extra tensor or a wrong shape."""
    expected = {f"model/{n}": v for n, v in state.model.state_dict().items()}
    expected |= {f"average/{n}": v for n, v in (state.average or {}).items()}
    parameters = {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    optim = {name: value for name, value in tensors.items() if name.startswith("optim/")}
    kept = {name.split("/")[1] for name in optim}
    missing = set(expected) - set(tensors)
    # A user-defined one has none of a weight before it was first trained, and perhaps never.
    if kept and is_built_in(state.optimizer):
        missing |= {f"optim/{n}" for n in set(parameters) - kept}
    stray = set(tensors) - set(expected) - set(optim) | {f"optim/{n}" for n in kept - set(parameters)}
    if missing:
        raise WeightsError(
            f"The checkpoint lacks {len(missing)} tensors of the model, such as {sorted(missing)[:5]}. It belongs to "
            "another network; start a new run."
        )
    if stray:
        raise WeightsError(
            f"The checkpoint has {len(stray)} tensors that the model does not have, such as {sorted(stray)[:5]}. It "
            "belongs to another network; start a new run."
        )
    for name, target in expected.items():
        if tensors[name].shape not in (target.shape, local_shard(target)[0].shape):
            raise WeightsError(_other_shape(name, tuple(tensors[name].shape), tuple(target.shape)))
        fill(target, tensors[name])
    groups = [group for group in state.optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counted_on_device = {parameter for group in groups for parameter in group["params"]}
    for name, value in optim.items():
        _, parameter_name, moment = name.split("/")
        parameter = parameters[parameter_name]
        moments = state.optimizer.state[parameter]
        if moment.endswith(_NUMBER):
            moments[moment.removesuffix(_NUMBER)] = value.item()
        elif moment == "step" and parameter not in counted_on_device:  # as torch's load_state_dict
            moments[moment] = value.to("cpu", copy=True)
        else:
            moments[moment] = sliced_like(parameter, value)


def restore(state: TrainState, ref: CheckpointRef, tensors: Mapping[str, Tensor]) -> None:
    """Makes `state` that of a checkpoint."""
    load_state_tensors(state, tensors)
    state.step = ref.step
    state.guard.load(ref.manifest.get("guard"))
