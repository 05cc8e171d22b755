"""A decoding process that lies: its answers are compared with the bytes, and reading a header takes no decoder and no time."""

import io
import random
import struct
import textwrap

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, ImageRejected, decode
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.data_prep.examine.decode_server import MAX_ANSWER_BYTES, PIXELS, Kind, ServerSettings, decode_answer
from vitline.data_prep.examine.image_header import read_header
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.infra.config import replace

POLICY = DecodePolicy(max_pixels=10_000)
LIARS = """
import numpy as np
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.images import examine_image

def lie(changes):
    return lambda data, policy: examine_image(data, DecodePolicy()) | changes

other_bytes = lie({"sha256": bytes(32)})
smaller = lie({"width_px": 3})
of_another_format = lie({"format": "PNG"})
of_a_refused_format = lie({"format": "TGA"})
not_a_mode = lie({"mode": "RGB\x1b[2J"})
within_no_limit = lie({"width_px": 60_000, "height_px": 60_000})
pixels = lambda data, policy: np.zeros((5, 7, 3), np.uint8)
"""


def file_of(width, height, file_format="JPEG", **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(file, file_format, **options)
    return file.getvalue()


@pytest.fixture
def liars(tmp_path, monkeypatch):
    (tmp_path / "liars.py").write_text(textwrap.dedent(LIARS))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("liars")
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("other_bytes", "other bytes"),
        ("smaller", "3 x 20 pixels for a file whose header says 30 x 20"),
        ("of_another_format", "format 'PNG' for a file that starts as JPEG"),
        ("of_a_refused_format", "format 'TGA'"),
        ("not_a_mode", "a colour mode that does not exist"),
        ("within_no_limit", "refuses: too_many_pixels"),
        ("pixels", "an answer of another kind"),
    ],
)
def test_an_answer_that_contradicts_the_bytes_is_a_crash(lie, why):
    with SandboxedDecoder(POLICY, timeout_s=60, memory_bytes=2 << 30, function=f"liars.{lie}") as examine:
        ((_, verdict),) = examine.run([(0, file_of(30, 20))])
    with pytest.raises(ImageRejected, match=f"decoder_crash: the decoder sent .*({why})"):
        raise verdict


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF"])
def test_pixels_of_another_process_equal_those_of_this_one(file_format):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned: the sizes of header and pixels are exchanged
    data = file_of(90, 70, file_format, exif=exif)
    pixels = decode_sandboxed(data, POLICY)
    assert pixels.shape == (90, 70, 3)
    assert np.array_equal(pixels, decode(data, POLICY))
    with pytest.raises(ImageRejected, match="too_many_pixels"):
        decode_sandboxed(file_of(200, 100), POLICY)


def test_only_pixels_may_be_long_and_only_as_long_as_the_policy_allows():
    settings = ServerSettings(policy=POLICY, memory_bytes=1, cpu_s=1, function=PIXELS)
    assert settings.most_bytes(Kind.PIXELS) == 8 + 3 * 10_000
    assert settings.most_bytes(Kind.EXAMINED) == MAX_ANSWER_BYTES
    assert replace(settings, function="os.abort").most_bytes(Kind.PIXELS) == MAX_ANSWER_BYTES
    with pytest.raises(ValueError, match="damaged answer"):
        decode_answer(Kind.PIXELS, struct.pack("<II", 3, 2) + bytes(17))
    with pytest.raises(ValueError, match="damaged answer"):
        decode_answer(Kind.REJECTED, b"decoder_crash\0said by a decoder")
    assert decode_answer(Kind.FAILED, b"\x1b[2Jgone") == " [2Jgone"


def test_no_file_makes_the_header_reader_fail_or_go_on_and_on():
    """Random tails behind the start of every format, and files that name endless lists."""
    starts = [
        b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8 ", b"BM", b"II*\0", b"MM\0*", b"P6\n",
        b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n", b"\0\0\0\x18ftypavif",
    ]  # fmt: skip
    rng = random.Random(0)
    for number in range(2_000):
        data = starts[number % len(starts)] + rng.randbytes(rng.randrange(200))
        reads = []

        def read(at, length, data=data, reads=reads):
            reads.append(at)
            assert length <= 1024
            return data[at : at + length]

        read_header(read)
        assert len(reads) < 10_000
    endless = lambda at, length: (b"\xff\xd8\xff" + b"\xff" * 1024)[at and 3 :][:length]  # noqa: E731
    assert read_header(endless).sizes == frozenset()
