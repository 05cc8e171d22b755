"""The table of sizes agrees with the networks."""

import pytest

from vitline.vit.models.build import meta_network
from vitline.vit.models.flops import forward_flops
from vitline.vit.models.variant_sizes import NUM_CLASSES, SIZES
from vitline.vit.models.variants import REGISTERED, network_variant


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTERED)
def test_table_has_the_counted_parameters_and_flops(name):
    config = network_variant(name)
    counted = sum(p.numel() for p in meta_network(config, NUM_CLASSES).parameters())
    assert SIZES[name] == (counted, forward_flops(config, NUM_CLASSES))


def test_table_has_every_registered_network():
    assert SIZES.keys() == set(REGISTERED)
