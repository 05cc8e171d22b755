"""A published network of 8 px."""

import pytest

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.storage import open_store
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish


@pytest.fixture
def tiny(tmp_path) -> str:
    """Its URI."""
    network = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    return publish(open_store(str(tmp_path)), "tiny", "1", build_network(network, 2), contract, ["a", "b"], {})
