"""Requests that are refused before any work is done."""

import pytest
from pydantic import ValidationError

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examples import presets

FOLDER = {"kind": "class_folders", "path": "/pictures"}


@pytest.mark.parametrize(
    ("request_fields", "place"),
    [
        ({"name": "My Pictures", "source": FOLDER}, "name"),
        ({"name": "a", "source": {"kind": "tarball"}}, "source"),
        ({"name": "a", "source": {**FOLDER, "style": "google"}}, "source.class_folders.style"),
        ({"name": "a", "source": FOLDER, "recipe": {"val_fraction": 0.6, "test_fraction": 0.5}}, "recipe"),
        (
            {"name": "a", "source": FOLDER, "recipe": {"decode": {"background": [0, 0, 256]}}},
            "recipe.decode.background.2",
        ),
        ({"name": "a", "source": FOLDER, "execution": {"max_refused_fraction": 2}}, "execution.max_refused_fraction"),
    ],
)
def test_a_wrong_request_names_its_field(request_fields, place):
    with pytest.raises(ValidationError) as caught:
        CorpusConfig.model_validate(request_fields)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [place]


def test_requests_survive_json():
    for preset in (presets.icons(), presets.new_icons("cache"), presets.digits(), presets.digits_5_to_9()):
        assert CorpusConfig.model_validate(preset.model_dump(mode="json")) == preset
