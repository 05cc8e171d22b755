"""The extension makes the pixels of `decode` and `train_pixels`, bit for bit, or refuses; it never crashes and never accepts more."""

import logging
import os
import random
import shutil
import subprocess
import sys
import types
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch

from vitline.data_prep.decode import DecodePolicy, ImageRejected, decode, is_common_jpeg
from vitline.vit.input.augment import resize, train_draws, train_pixels
from vitline.vit.input.augmentations.box import Box
from vitline.vit.input.batches import LoaderResources, eval_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoding import native_view
from vitline.vit.input.decoding.native_view import TrainingView, native_decoder

from ....batches import train_batches
from ....pictures import encoded
from . import conftest, damage

SUBSAMPLINGS = ("444", "422", "420", "440", "Gray")


def picture(rng, height, width):
    blocks = rng.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    return resize(blocks, Box(0, 0, *blocks.shape[:2]), height, width, antialias=True)[0].permute(1, 2, 0)


def jpeg(rng, height, width, subsampling="420"):
    pixels = np.ascontiguousarray(picture(rng, height, width).numpy())
    if subsampling == "Gray":
        pixels = np.ascontiguousarray(pixels[..., :1])
    colours = "GRAY" if subsampling == "Gray" else "RGB"
    quality = int(rng.integers(1, 101))
    return simplejpeg.encode_jpeg(pixels, quality=quality, colorspace=colours, colorsubsampling=subsampling)


def view_of(module, data, box, side, mirror):
    """The view, or None if the extension refuses the file."""
    out = np.empty((side, side, 3), np.uint8)
    return out if module.view(data, *box, out, side, mirror) else None


def view_of_whole(pixels, box, side, mirror):
    view = resize(pixels, box, side, side, antialias=True)
    return (view.flip(3) if mirror else view)[0].permute(1, 2, 0).numpy()


@pytest.fixture
def installed(native, monkeypatch):
    """As if the extension had been installed."""
    monkeypatch.setitem(sys.modules, "vitline_native", native)
    native_decoder.cache_clear()
    yield native
    native_decoder.cache_clear()


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_any_view_of_any_picture_is_equal_bit_for_bit(native, subsampling):
    rng = np.random.default_rng(3)
    for _ in range(40):
        height, width = rng.integers(1, 200, 2).tolist()
        data = jpeg(rng, height, width, subsampling)
        whole = simplejpeg.decode_jpeg(data)
        assert native.size(data) == (height, width)
        for _ in range(4):
            h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
            box = Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
            side, mirror = int(rng.integers(1, 240)), bool(rng.integers(2))
            found = view_of(native, data, box, side, mirror)
            np.testing.assert_array_equal(found, view_of_whole(whole, box, side, mirror), str((box, side, mirror)))


def test_photographs_are_equal_bit_for_bit_with_randaugment_too(installed):
    photos = pytest.importorskip("sklearn.datasets").load_sample_images().images
    config = AugmentConfig(randaugment_layers=2, randaugment_magnitude=15)
    wanted, found = torch.empty(2, 224, 224, 3, dtype=torch.uint8)
    for photo in photos:
        data = encoded(photo, "JPEG", quality=90)
        for draws in train_draws(0, 0, np.arange(2), 2).tolist():
            view = TrainingView(draws, config)
            train_pixels(decode(data), draws, config, wanted)
            assert view.write_natively(data, DecodePolicy(), found)
            assert torch.equal(wanted, found)


def test_unusual_files_are_left_to_the_other_decoder(native):
    pixels = picture(np.random.default_rng(0), 60, 70).numpy()
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"
    plain, policy = encoded(pixels, "JPEG"), DecodePolicy()
    assert is_common_jpeg(plain, policy)
    assert native.size(plain) == (60, 70)
    assert not is_common_jpeg(encoded(pixels, "JPEG", exif=exif), policy)
    assert not is_common_jpeg(encoded(pixels, "PNG"), policy)
    assert not is_common_jpeg(plain, DecodePolicy(max_bytes=len(plain) - 1))
    cmyk = next(data for data in damage.originals() if simplejpeg.decode_jpeg_header(data)[2] == "CMYK")
    in_rare_chroma = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorsubsampling="411")
    for unusual in (
        encoded(pixels, "JPEG", progressive=True),
        cmyk,
        in_rare_chroma,
        encoded(pixels, "PNG"),
        b"",
        b"\xff\xd8\xff",
    ):
        assert native.size(unusual) is None
        assert view_of(native, unusual, Box(0, 0, 8, 8), 8, False) is None
    for box in (Box(53, 0, 8, 8), Box(0, 63, 8, 8), Box(0, 0, 61, 8)):
        assert view_of(native, plain, box, 8, False) is None
    with pytest.raises(ValueError, match="no part of an image"):
        native.view(plain, -1, 0, 8, 8, np.empty((8, 8, 3), np.uint8), 8, False)
    with pytest.raises(ValueError, match="does not fit"):
        native.view(plain, 0, 0, 8, 8, np.empty((8, 8, 3), np.uint8), 9, False)


def test_what_the_policy_refuses_is_left_to_the_other_decoder(installed):
    out, data = torch.empty(16, 16, 3, dtype=torch.uint8), jpeg(np.random.default_rng(0), 60, 70)
    view = TrainingView(train_draws(0, 0, np.arange(1)).tolist()[0], AugmentConfig(image_size_px=16))
    assert view.write_natively(data, DecodePolicy(), out)
    for policy in (DecodePolicy(max_pixels=4199), DecodePolicy(min_side_px=61), DecodePolicy(formats=("PNG",))):
        assert not view.write_natively(data, policy, out)
    whole = TrainingView(view.draws, AugmentConfig(image_size_px=16, train_crop="random", train_resize_px=20))
    assert not whole.write_natively(data, DecodePolicy(), out)


def test_a_truncated_file_is_never_accepted(native):
    data = jpeg(np.random.default_rng(1), 60, 70, "444")
    for length in range(len(data) - 1):
        assert view_of(native, data[:length], Box(0, 0, 4, 70), 8, False) is None


def _same_decision(native, data):
    """Whether the decoder of whole images accepts a file; the extension may accept no more, and no other pixels."""
    policy = DecodePolicy(max_pixels=100_000)
    if not is_common_jpeg(data, policy) or (size := native.size(data)) is None or size[0] * size[1] > policy.max_pixels:
        return None
    found = view_of(native, data, box := Box(0, 0, *size), 40, False)
    try:
        whole = decode(data, policy)
    except ImageRejected:
        assert found is None
        return False
    if found is not None:
        np.testing.assert_array_equal(found, view_of_whole(whole, box, 40, False))
    return True


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_files_get_the_decision_of_the_other_decoder(native):
    rng, files = random.Random(0), damage.originals()
    decisions = [_same_decision(native, damage.damaged(rng.choice(files), rng)) for _ in range(1500)]
    assert decisions.count(True) > 50
    assert decisions.count(False) > 50


@pytest.fixture
def photographs(corpus_maker, tmp_path, monkeypatch):
    """A corpus of JPEGs, one of which is damaged."""
    rng = np.random.default_rng(5)
    data = [jpeg(rng, *rng.integers(30, 90, 2).tolist(), SUBSAMPLINGS[i % 5]) for i in range(24)]
    data[7] = data[7][: len(data[7]) // 2]
    return corpus_maker(tmp_path, segments=(24,), encoded=data)


def test_batches_are_equal_with_and_without_the_extension(photographs, installed, monkeypatch):
    recipe = InputConfig(global_batch_size=8, num_lanes=2, shuffle_window=2, augment=AugmentConfig(image_size_px=32))
    written = []

    def counted(self, *args, write=TrainingView.write_natively):
        written.append(write(self, *args))
        return written[-1]

    def images(loading):
        given = (photographs.store, photographs.manifest, "train", recipe)
        with train_batches(*given, seed=0, micro_batch_size=8, mask_bad=True, loading=loading) as steps:
            return [(b.images.clone(), b.valid.clone(), b.bad) for step in islice(steps, 3) for b in step]

    def without(loading):
        with monkeypatch.context() as patch:
            patch.setattr(native_view, "native_decoder", lambda: None)
            return images(loading)

    wanted = without(LoaderResources())
    monkeypatch.setattr(TrainingView, "write_natively", counted)
    found = images(LoaderResources())
    assert written.count(True) >= 23
    assert written.count(False) >= 1  # the damaged one
    for (pixels, valid, bad), (others, also_valid, also_bad) in zip(wanted, found, strict=True):
        assert torch.equal(pixels, others)
        assert torch.equal(valid, also_valid)
        assert bad == also_bad
    written.clear()
    images(LoaderResources(decoded_cache_bytes=2**20))  # what fits the cache is decoded whole, for later epochs
    assert written == []


def test_evaluation_never_uses_it(tiny, monkeypatch):
    def fail():
        raise AssertionError("evaluation decodes whole images")

    monkeypatch.setattr(native_view, "native_decoder", fail)
    with eval_batches(tiny.store, tiny.manifest, "train", AugmentConfig(image_size_px=16), batch_size=8) as found:
        assert sum(batch.num_examples for batch in found) == len(tiny.pixels)


def test_an_extension_that_differs_by_one_level_is_not_used(native, monkeypatch, caplog):
    def off_by_one(*args):
        made = native.view(*args)
        args[5][0, 0, 0] ^= 1
        return made

    for wrong in (off_by_one, lambda *args: False, lambda data: True):
        monkeypatch.setitem(sys.modules, "vitline_native", types.SimpleNamespace(size=native.size, view=wrong))
        native_decoder.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert native_decoder() is None
            assert native_decoder() is None
    native_decoder.cache_clear()
    assert len(caplog.records) == 3
    assert "up to 1 grey levels" in caplog.text


def test_without_the_extension_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vitline_native", None)
    native_decoder.cache_clear()
    assert native_decoder() is None
    native_decoder.cache_clear()
    assert not caplog.records


@pytest.mark.long
def test_no_damaged_file_reads_or_writes_outside_of_memory(tmp_path):
    """Long fuzzing with the compiler's checks of addresses and of undefined behaviour."""
    conftest.build(tmp_path, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    asan = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    command = [
        "env",
        f"LD_PRELOAD={asan}",
        "ASAN_OPTIONS=detect_leaks=0",
        sys.executable,
        damage.__file__,
        str(tmp_path),
        "20",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 1000


@pytest.mark.slow
def test_pip_builds_a_wheel_or_says_what_is_missing(native, tmp_path):
    source = tmp_path / "native"
    source.mkdir()
    for file in ("pyproject.toml", "setup.py", "needs.py", "README.md", "vitline_native.c"):
        (source / file).write_bytes((conftest.SOURCE.parent / file).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", str(source), "-w", str(tmp_path)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-abi3-" in wheel.name
    assert any(name.startswith("vitline_native") and name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    shutil.rmtree(source / "build")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    for without in ("absent", f"{compiler} -nostdinc"):  # no compiler, no headers
        done = subprocess.run(pip, capture_output=True, text=True, check=False, env=os.environ | {"CC": without})
        assert done.returncode != 0
        assert "libjpeg62-turbo-dev" in done.stdout + done.stderr
