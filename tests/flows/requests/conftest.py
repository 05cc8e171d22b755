"""A published network of 8 px."""

import pytest

from data_prep.decode import DecodePolicy
from infra.storage import open_store
from vit.input.config import AugmentConfig
from vit.input.image_contract import ImageContract
from vit.models.build import build_network
from vit.models.config import ViTConfig
from vit.published import publish


@pytest.fixture
def tiny(tmp_path) -> str:
    """Its URI."""
    network = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    return publish(open_store(str(tmp_path)), "tiny", "1", build_network(network, 2), contract, ["a", "b"], {})
