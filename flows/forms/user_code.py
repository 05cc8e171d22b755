"""User-defined networks and losses in the config of a training: their code is found, digested and measured before anything is spent."""

import json
import subprocess
import sys
from typing import Any

from vitline.infra.config import replace
from vitline.vit.config import TrainConfig
from vitline.vit.models.config import UserNetworkConfig
from vitline.vit.models.user_code import check_allowed, check_source, is_reference, source_digest

MEASURE_S = 300


def with_user_code(config: TrainConfig) -> TrainConfig:
    """The config with the digest of such code, and with what was measured of the network; other configs as they are.

    Raises ValueError for a package that is not in VITLINE_RECIPE_PACKAGES or not found, for a network that cannot be built, and for
    code that has changed since a model or parent was made with it.
    """
    recipe, changes = config.recipe, dict[str, Any]()
    if isinstance(network := recipe.model, UserNetworkConfig):
        check_allowed(network.network, "network")
        if network.source:
            check_source(network.network, network.source, "network")
        else:
            found = {"source": source_digest(network.network), **_measured(network)}
            changes |= {f"recipe.model.{name}": value for name, value in found.items()}
    if is_reference(recipe.loss):
        check_allowed(recipe.loss, "loss")
        if recipe.loss_source:
            check_source(recipe.loss, recipe.loss_source, "loss")
        else:
            changes["recipe.loss_source"] = source_digest(recipe.loss)
    return replace(config, **changes) if changes else config


def _measured(network: UserNetworkConfig) -> dict[str, int]:
    """Its width and FLOPs, from a process that imports its code anew: this one may be a worker that runs for weeks."""
    command = [sys.executable, "-P", "-m", "vitline.vit.cost.user_network"]
    try:
        done = subprocess.run(
            command, input=network.model_dump_json(), capture_output=True, text=True, timeout=MEASURE_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise ValueError(
            f"The network {network.network!r} was not built within {MEASURE_S} s, although without memory. Build it by hand to see why."
        ) from late
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1][:400] if done.stderr.strip() else "it failed")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found
