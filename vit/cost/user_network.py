"""Counts the width of the features and the FLOPs of a user-defined network, in a process of its own: its code is imported anew.

python -m vitline.vit.cost.user_network < config.json
"""

import json
import sys

import torch

from vitline.vit.models.build import meta_network
from vitline.vit.models.config import UserNetworkConfig


def measured(config: UserNetworkConfig) -> dict[str, int]:
    """The fields of the config that are measured. The network is built and run without memory. Raises ValueError naming what does not
    work."""
    from torch.utils.flop_counter import FlopCounterMode

    network, side = meta_network(config, 2).eval(), config.image_size_px
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            features = network.features(torch.empty(1, 3, side, side, device="meta"))
    except Exception as error:
        raise ValueError(
            f"The features of {config.network} cannot be computed: {type(error).__name__}: {error}"
        ) from error
    width = network.head.in_features
    if tuple(features.shape) != (1, width):
        raise ValueError(
            f"The features of {config.network} have shape {tuple(features.shape)} for one image, but its head takes (1, {width})."
        )
    return {"embed_dim": width, "feature_flop": counter.get_total_flops()}


if __name__ == "__main__":
    try:
        print(json.dumps(measured(UserNetworkConfig.model_validate(json.load(sys.stdin)))))
    except ValueError as refusal:
        sys.exit(str(refusal))
