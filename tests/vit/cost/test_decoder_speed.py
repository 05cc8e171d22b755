"""Both decoders on images of a corpus: what `vitline data bench` says of them."""

import numpy as np
import pytest
import simplejpeg

from vitline.vit.cost import decoder_speed
from vitline.vit.cost.decoder_speed import DecoderSpeed
from vitline.vit.input.batches import Source
from vitline.vit.input.decoding import native_view

from ..input.conftest import make_corpus
from ..input.decoding.conftest import native  # noqa: F401


@pytest.fixture
def measured(tmp_path, train_config, monkeypatch):
    """measured(decoder): with three JPEGs and a PNG that is none, and this extension or None."""
    noise = np.random.default_rng(0).integers(0, 256, (3, 40, 48, 3), dtype=np.uint8)
    files = [*map(simplejpeg.encode_jpeg, noise), b"no image"]
    made = make_corpus(tmp_path, (4,), encoded=files)

    def measure(decoder):
        monkeypatch.setattr(decoder_speed, "native_decoder", lambda: decoder)
        monkeypatch.setattr(native_view, "native_decoder", lambda: decoder)
        sources = [Source(made.store, made.manifest, "train")]
        return decoder_speed.decoder_speed(sources, train_config("decoders"), seconds=10)

    return measure


def test_without_the_extension_only_whole_images_are_measured(measured):
    found = measured(None)
    assert found.whole > 0
    assert found.native is None
    assert "is not installed or cannot be used here" in found.sentence()


def test_with_the_extension_both_are_measured_on_images_that_can_be_decoded(measured, native):  # noqa: F811
    found = measured(native)
    assert found.native_fraction == 1
    assert min(found.whole, found.native) > 0


def test_the_sentence_names_the_decoder_in_use_and_what_the_other_would_give():
    assert DecoderSpeed(400, 1000, 0.75).sentence() == (
        "Decoder: vitline-native for 75% of the images, 1,000 images/s a core; without it, decoding whole images, 400 (0.40 x)."
    )
