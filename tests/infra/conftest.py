"""Images of infra/images for tests that enter them."""

import pytest


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    from ..servers.images import Images, why_not_here

    if why := why_not_here():
        pytest.skip(why)
    made = Images(tmp_path_factory.mktemp("images"))
    yield made
    made.delete()
