"""Damaged files of every format: each is accepted or refused, and none stops the job. Files that Pillow refuses are refused."""

import functools
import io
import random
import struct
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, DecodeReason, Format, ImageRejected
from vitline.data_prep.examine.check_answer import check_examined
from vitline.data_prep.examine.image_header import read_header
from vitline.data_prep.examine.images import Examined, examine_image
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's warnings about metadata
POLICY = DecodePolicy(max_pixels=100_000)  # files that lease more pixels are refused by their header
HUGE = (0, 1, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


@functools.cache
def originals():
    """Intact files of a small photograph by name: every format with its unusual features. TGA has no magic number, and is
    accepted only if a policy names it."""
    photos = pytest.importorskip("sklearn.datasets").load_sample_images().images
    photo, other = (Image.fromarray(array).resize((40, 32)) for array in photos)
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = photo.copy()
    rgba.putalpha(other.convert("L"))
    deep = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
    frames = {"save_all": True, "append_images": [other, photo]}
    wanted = {
        "JPEG": [(photo, {}), (photo, {"progressive": True}), (photo, {"exif": exif}), (photo.convert("CMYK"), {})],
        "MPO": [(photo, frames)],
        "PNG": [(photo.convert(mode), {}) for mode in ("1", "L", "LA", "P", "RGB")],
        "GIF": [(photo, {}), (photo, frames)],
        "WEBP": [(photo, {}), (rgba, {"lossless": True}), (photo, frames)],
        "BMP": [(photo, {}), (photo.convert("P"), {})],
        "TIFF": [(photo, {"compression": c}) for c in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")],
        "PPM": [(photo, {}), (photo.convert("L"), {}), (photo.convert("1"), {}), (deep.convert("I"), {})],
        "JPEG2000": [(photo, {}), (rgba, {"no_jp2": True}), (deep, {})],
        "AVIF": [(photo, {"exif": exif}), (rgba, {})],
        "TGA": [(photo, {}), (rgba, {"compression": "tga_rle"}), (photo.convert("P"), {})],
    }
    wanted["PNG"] += [
        (rgba, {}),
        (deep, {}),
        (photo.convert("P"), {"transparency": bytes(range(256))}),
        (photo, frames),
    ]
    wanted["TIFF"] += [(photo, frames), (deep, {"exif": exif}), (photo.convert("CMYK"), {})]
    Image.init()
    files = {}
    for file_format, variants in wanted.items():
        for number, (image, options) in enumerate(variants if file_format in Image.SAVE else ()):
            file = io.BytesIO()
            # Pillow stores save options in the image, and fails on them in the next format: save a copy.
            copies = {key: [one.copy() for one in value] for key, value in options.items() if key == "append_images"}
            image.copy().save(file, file_format, **options | copies)
            files[f"{file_format} {number}"] = file.getvalue()
    rows = b"".join(b"%d " % level for level in np.asarray(photo).ravel())
    return files | {"plain PPM": b"P3\n40 32\n255\n" + rows}


@st.composite
def damaged(draw):
    """One of the files, truncated, spliced with another, or with bits, bytes, ranges and numbers changed."""
    files = {name: data for name, data in originals().items() if "TGA" not in name}
    name = st.sampled_from(sorted(files))
    data = bytearray(files[draw(name)])
    for _ in range(draw(st.integers(1, 4))):
        # Changes of headers have the largest effect.
        at = draw(st.integers(0, min(len(data), 64)) | st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "bit", "byte", "number", "splice", "drop", "repeat"]))
        length = draw(st.integers(1, 64))
        if kind == "cut":
            del data[at:]
        elif kind == "bit" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and at < len(data):
            data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
        elif kind == "number":
            code = draw(st.sampled_from([">I", "<I", ">H", "<H"]))
            size = struct.calcsize(code)
            data[at : at + size] = struct.pack(code, draw(st.sampled_from(HUGE)) % 256**size)
        elif kind == "splice":
            other = files[draw(name)]
            data[at:] = other[draw(st.integers(0, len(other))) :]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "repeat":
            data[at:at] = data[at : at + length] * draw(st.integers(1, 3))
    return bytes(data)


def check(verdict, data=b""):
    if isinstance(verdict, ImageRejected):
        assert verdict.reason in get_args(DecodeReason)
        assert verdict.detail
    else:
        if data:  # what the parent process compares must hold for every file that is accepted
            check_examined(data, verdict, POLICY)
        assert verdict.keys() == Examined.__annotations__.keys()
        assert 0 < verdict["width_px"] * verdict["height_px"] <= POLICY.max_pixels
        assert {
            len(verdict["sha256"]),
            len(verdict["pixel_sha256"]),
            len(verdict["phash"]),
            len(verdict["phash_mirror"]),
        } == {32}


@pytest.mark.parametrize("name", ["JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_intact_files_are_accepted(name):
    """Otherwise refusals of the damaged files would prove nothing."""
    files = [data for key, data in originals().items() if name in key.split()]
    assert files
    for data in files:
        check(examine_image(data, POLICY), data)
        if name != "GIF":
            assert read_header(lambda at, length, data=data: data[at : at + length]).sizes


# The same cases in every run, decoded in the process of the tests.
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(damaged())
def test_damaged_file_is_accepted_or_refused_with_a_reason(data):
    try:
        check(examine_image(data, POLICY), data)
    except ImageRejected as rejected:
        check(rejected)


def mutated(data, rng):
    """A file with one to three places cut, zeroed, overwritten, left out or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(max(1, len(changed))), rng.randint(1, 32)
        spot = changed[at : at + length]
        kind = rng.choice(["bit", "zeros", "noise", "cut", "drop", "repeat"])
        if kind == "bit" and spot:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del changed[max(1, at) :]
        else:
            new = {"zeros": bytes(len(spot)), "noise": rng.randbytes(len(spot)), "repeat": spot * 2}
            changed[at : at + length] = new.get(kind, b"")
    return bytes(changed)


def pillow_refuses(data, formats):
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            image.load()
        return False
    except Exception:  # any error means that the image is damaged
        return True


def is_accepted(data, policy):
    try:
        check_examined(data, found := examine_image(data, policy), policy)
        return found["width_px"] > 0
    except ImageRejected:
        return False


def refused_by_pillow_but_accepted(seeds):
    files = originals()
    names = sorted(files)
    accepted, num_refused = [], 0
    for seed in seeds:
        rng, name = random.Random(seed), names[seed % len(names)]
        policy = POLICY.model_copy(update={"formats": get_args(Format) if "TGA" in name else POLICY.formats})
        data = mutated(files[name], rng)
        if pillow_refuses(data, policy.formats):
            num_refused += 1
            accepted += [(name, seed)] if is_accepted(data, policy) else []
    assert num_refused > len(seeds) / 4  # otherwise the test would prove little
    return accepted


def test_files_that_pillow_refuses_are_refused():
    assert refused_by_pillow_but_accepted(range(1_000)) == []


@pytest.mark.slow
def test_files_that_pillow_refuses_are_refused_in_ten_thousand_mutations():
    assert refused_by_pillow_but_accepted(range(1_000, 11_000)) == []


@pytest.mark.long
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(damaged(), min_size=20, max_size=20))
def test_thousands_of_damaged_files_give_one_verdict_each(files):
    """12,000 cases, new in every run, decoded by the decoding process."""
    with SandboxedDecoder(POLICY, timeout_s=60, memory_bytes=2 << 30) as decoder:
        verdicts = list(decoder.run(enumerate(files)))
    assert [tag for tag, _ in verdicts] == list(range(len(files)))
    for _, verdict in verdicts:
        check(verdict)
