"""Fixtures that compare networks: weights far from zero, and a relative difference."""

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(scope="session")
def randomise():
    """randomise(module, seed): draws weights of ordinary size, so that attention is uneven and logits are of order 1."""

    def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in module.named_parameters():
                drawn = torch.randn(value.shape, generator=generator)
                if value.ndim == 1:
                    value.copy_(drawn * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
                elif "pos_embed" in name or "token" in name or "latent" in name or "probe" in name:
                    value.copy_(drawn)
                else:  # each output channel of another scale, as after training
                    size = torch.exp(0.3 * torch.randn(len(value), generator=generator)).reshape(
                        -1, *[1] * (value.ndim - 1)
                    )
                    value.copy_(drawn * size / value[0].numel() ** 0.5)
        return module.eval()

    return randomise


@pytest.fixture(scope="session")
def rel_diff():
    """rel_diff(ours, theirs): the largest absolute difference, divided by their largest absolute value."""

    def rel_diff(ours: Tensor, theirs: Tensor) -> float:
        assert ours.shape == theirs.shape
        return float((ours - theirs).abs().max() / theirs.abs().max())

    return rel_diff
