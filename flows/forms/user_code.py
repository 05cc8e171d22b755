"""User-defined networks, losses and optimizers in configs: their code is found, digested and tried before anything is spent."""

import functools
import json
import subprocess
import sys
from typing import Any

from vitline.infra.config import replace
from vitline.vit.config import TrainConfig, UpdateConfig
from vitline.vit.models.config import NetworkConfig, UserNetworkConfig
from vitline.vit.models.user_code import check_allowed, check_source, is_reference, source_digest, source_of

MEASURE_S = 300


def with_user_code(config: TrainConfig) -> TrainConfig:
    """The config with the digest of such code, and with what was measured of the network; other configs as they are.

    Raises ValueError for a package that is not in VITLINE_RECIPE_PACKAGES or not found, for a network that cannot be built, for an
    optimizer that cannot train it, and for code that has changed since a model or parent was made with it.
    """
    recipe, changes = config.recipe, dict[str, Any]()
    if isinstance(network := recipe.model, UserNetworkConfig):
        check_allowed(network.network, "network")
        if network.source:
            check_source(network.network, network.source, "network")
        else:
            found = {"source": source_digest(network.network), **_measured(network)}
            changes |= {f"recipe.model.{name}": value for name, value in found.items()}
    if source := source_of(recipe.loss, "loss", recipe.loss_source):
        changes["recipe.loss_source"] = source
    changes |= {f"recipe.optim.{name}": value for name, value in optimizer_source(recipe.optim).items()}
    config = replace(config, **changes) if changes else config
    check_optimizer(config.recipe.model, config.recipe.optim)
    return config


def optimizer_source(optim: UpdateConfig) -> dict[str, str]:
    """The digest of the code of a user-defined optimizer, as a change of its config; none for those of vitline and torch."""
    source = source_of(optim.optimizer, "optimizer", optim.optimizer_source)
    return {"optimizer_source": source} if source else {}


def check_optimizer(model: NetworkConfig, optim: UpdateConfig) -> None:
    """Raises ValueError for a user-defined optimizer, or one of torch by its import path, that cannot train such a network."""
    if is_reference(optim.optimizer):
        given = {"model": model.model_dump(mode="json"), "optim": optim.model_dump(mode="json")}
        _tried(f"optimizer {optim.optimizer!r}", json.dumps(given))


@functools.cache
def _tried(what: str, given: str) -> None:
    """Once for each config, which has the digest of the code."""
    _from_new_process(what, "user_optimizer", given)


def _measured(network: UserNetworkConfig) -> dict[str, int]:
    """Its width and FLOPs."""
    return _from_new_process(f"network {network.network!r}", "user_network", network.model_dump_json())


def _from_new_process(what: str, module: str, given: str) -> dict[str, int]:
    """What a module of `vit/cost` prints, in a process that imports user code anew: this one may be a worker that runs for weeks."""
    command = [sys.executable, "-P", "-m", f"vitline.vit.cost.{module}"]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=MEASURE_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise ValueError(
            f"The {what} was not built within {MEASURE_S} s, although without memory. Build it by hand to see why."
        ) from late
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1][:400] if done.stderr.strip() else "it failed")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found
