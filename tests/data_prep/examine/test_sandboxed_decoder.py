"""The decoding process: its verdicts equal those of this process, and each crash costs one image."""

import io
import itertools
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from pathlib import Path

import pytest
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_server import Kind, decode_answer, encode_examined
from vitline.data_prep.examine.images import examine_image
from vitline.data_prep.examine.local_range import LocalRange
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.infra.storage import open_store

from ...eventually import eventually

POLICY = DecodePolicy(max_pixels=100_000)
MEMORY = 2 << 30

HOSTILE = textwrap.dedent(
    """
    import mmap, os, signal, sys
    from vitline.data_prep.examine.images import examine_image

    # The process can open no file when it examines images, but it keeps the memory that it shares with a file.
    SHARED = mmap.mmap(os.open(__file__.replace("hostile_decoder.py", "shared"), os.O_RDWR), 64)

    def examine(data, policy):
        '''Does what the content of the image requests.'''
        kind, _, rest = data.partition(b":")
        if kind == b"kill":
            os.kill(os.getpid(), int(rest))
        if kind == b"once":  # crashes unless an earlier call has
            if not SHARED[0]:
                SHARED[0] = 1
                os.kill(os.getpid(), signal.SIGKILL)
            data = bytes(3)
        if kind == b"exit":
            os._exit(3)
        if kind == b"hang":
            while True:
                pass
        if kind == b"memory":
            bytearray(int(rest))
        if kind == b"bug":
            raise KeyError("not an error of images")
        if kind == b"print":
            os.write(1, b"libfoo: warning\\n")
            os.write(2, b"libfoo: warning\\n" * 10_000)
            data = bytes(3)
        if kind == b"forge":  # writes a forged answer to the pipe of answers
            for fd in range(3, 10):
                try:
                    os.write(fd, rest)
                except OSError:
                    pass
        if kind == b"pid":
            SHARED[:] = str(os.getpid()).encode().ljust(64)
            while True:
                pass
        return examine_image(data, policy)
    """
)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Dotted name of a function that crashes, hangs and so on, as the content of the image requests."""
    (tmp_path / "hostile_decoder.py").write_text(HOSTILE)
    (tmp_path / "shared").write_bytes(bytes(64))
    monkeypatch.syspath_prepend(tmp_path)
    return "hostile_decoder.examine"


def decoder(function="vitline.data_prep.examine.images.examine_image", timeout_s=60.0, memory_bytes=MEMORY):
    return SandboxedDecoder(POLICY, timeout_s=timeout_s, memory_bytes=memory_bytes, function=function)


def picture(number, file_format="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (9, 8), (number % 256, number // 256, 7)).save(file, file_format)
    return file.getvalue()


def decoded_here(data):
    try:
        return examine_image(data, POLICY)
    except ImageRejected as rejected:
        return rejected


def plain(outcome):
    return (outcome.reason, outcome.detail) if isinstance(outcome, ImageRejected) else outcome


def crash(outcome):
    """The detail of a `decoder_crash`."""
    assert isinstance(outcome, ImageRejected)
    assert outcome.reason == "decoder_crash"
    return outcome.detail


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(params=["bytes", "ranges"])
def sent(request, tmp_path):
    """sent(images): the images with their numbers, as the examiner takes them: bytes, or consecutive ranges of one file."""

    def send(images):
        if request.param == "bytes":
            return enumerate(images)
        (tmp_path / "images").write_bytes(b"".join(images))
        ends = itertools.pairwise(itertools.accumulate(map(len, images), initial=0))
        return ((i, LocalRange.of(open_store(tmp_path), "images", *span)) for i, span in enumerate(ends))

    return send


def test_verdicts_equal_those_of_decoding_in_this_process(sent):
    wide = Image.new("RGB", (500, 1))
    file = io.BytesIO()
    wide.save(file, "BMP")
    large = io.BytesIO()  # 3.6 MB: more than a pipe holds
    Image.frombytes("RGB", (300, 4000), random.Random(0).randbytes(3_600_000)).save(large, "BMP")
    odd = [b"", b"\xff\xd8\xff garbage", picture(1)[:-20], file.getvalue(), b"GIF89a\xed\xa0\x80"]
    images = [
        *odd,
        large.getvalue(),
        *(picture(i, ("PNG", "JPEG", "WEBP")[i % 3]) for i in range(90)),
        *odd,
        picture(0),
    ]
    with SandboxedDecoder(DecodePolicy(max_pixels=2_000_000), timeout_s=60, memory_bytes=MEMORY) as decoder:
        for _ in range(2):
            verdicts = list(decoder.run(sent(images)))
    assert [tag for tag, _ in verdicts] == list(range(len(images)))
    large_policy = DecodePolicy(max_pixels=2_000_000)
    assert verdicts[len(odd)][1] == examine_image(large.getvalue(), large_policy)
    assert [plain(v) for tag, v in verdicts if tag != len(odd)] == [
        plain(decoded_here(data)) for tag, data in enumerate(images) if tag != len(odd)
    ]


def test_file_that_becomes_shorter_is_an_error_with_its_name(tmp_path):
    (tmp_path / "1.png").write_bytes(picture(1))
    shrinking = LocalRange.of(open_store(tmp_path), "1.png", 0, None)
    (tmp_path / "1.png").write_bytes(picture(1)[:20])
    with decoder() as examine:
        with pytest.raises(OSError, match=r"missing at its end.*1\.png"):
            list(examine.run([(1, shrinking)]))
        assert plain(dict(examine.run([(2, picture(2))]))[2]) == decoded_here(picture(2))


@pytest.mark.slow
def test_a_crash_costs_one_image(hostile, sent):
    """Whatever crashes, hangs or deceives the child, all other images keep verdict and position."""
    deaths = {
        7: (f"kill:{int(signal.SIGSEGV)}", "SIGSEGV"),
        8: ("exit:", "exit code 3"),
        30: (f"memory:{MEMORY}", f"{MEMORY:,} bytes of address space"),
        31: ("hang:", "no answer within 1 s"),
        59: ("bug:", "KeyError"),
    }
    images = [deaths[i][0].encode() if i in deaths else picture(i) for i in range(60)]
    images[40] = b"forge:" + struct.pack("<BI", Kind.REJECTED, 2**32 - 1) + b"corrupt\0"
    with decoder(hostile, timeout_s=1.0) as examine:
        verdicts = dict(examine.run(sent(images)))
    assert list(verdicts) == list(range(60))
    assert "an answer of 4,294,967,295 bytes" in crash(verdicts.pop(40))
    for i, verdict in verdicts.items():
        if i in deaths:
            assert deaths[i][1] in crash(verdict)
            assert "2 times" in crash(verdict)
        else:
            assert verdict == decoded_here(images[i])


def test_one_crash_is_retried_and_printed_output_is_ignored(hostile):
    images = [picture(1), b"once:", b"print:", picture(2)]
    with decoder(hostile) as examine:
        verdicts = [verdict for _, verdict in examine.run(enumerate(images))]
    assert [plain(v) for v in verdicts] == [
        plain(decoded_here(d)) for d in (picture(1), bytes(3), bytes(3), picture(2))
    ]


def test_an_image_too_large_for_the_memory_limit_is_refused_alone():
    """Of 36 million pixels, flat, so a small file; the limit is where this process has none."""
    image = io.BytesIO()
    Image.new("CMYK", (6000, 6000)).save(image, "JPEG")
    images = [picture(1), image.getvalue(), picture(2)]
    with SandboxedDecoder(DecodePolicy(), timeout_s=60, memory_bytes=450_000_000) as examine:
        verdicts = [verdict for _, verdict in examine.run(enumerate(images))]
    assert "450,000,000 bytes of address space" in crash(verdicts[1])
    assert verdicts[::2] == [decoded_here(data) for data in images[::2]]


def test_a_child_that_cannot_start_is_not_blamed_on_images():
    with decoder("data_prep.no_such_module.examine") as examine, pytest.raises(RuntimeError, match="no_such_module"):
        list(examine.run([(0, picture(0))]))
    with decoder(memory_bytes=1 << 20) as examine, pytest.raises(RuntimeError, match="decode_memory_bytes"):
        list(examine.run([(0, picture(0))]))


@pytest.mark.skipif(sys.platform != "linux", reason="an environment is read from /proc")
def test_the_child_gets_no_secrets_in_its_environment(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-from-decoders")
    with SandboxedDecoder(
        DecodePolicy(max_bytes=99_999), timeout_s=60, memory_bytes=MEMORY
    ) as examine:  # a child of its own
        list(examine.run([(0, picture(0))]))
        assert b"hidden" not in Path(f"/proc/{examine._child._process.pid}/environ").read_bytes()


def test_the_child_is_kept_unless_images_are_in_flight(hostile):
    """If a run is left early, by an error of the consumer or of the images, the next examiner gets only its own verdicts."""

    def pid_of(examine):
        list(examine.run([(0, picture(0))]))
        return examine._child._process.pid

    with decoder(hostile) as examine:
        first = pid_of(examine)
    with decoder(hostile) as examine:
        assert pid_of(examine) == first
        images = [*map(picture, range(4)), b"hang:"]
        for tag, _ in examine.run(enumerate(images)):
            if tag == 3:
                break
        second = pid_of(examine)
        assert second != first
        assert gone(first)

    def failing():
        yield from ((i, picture(i)) for i in range(3))
        raise OSError("store")

    def interrupted():
        with decoder() as examine:
            for _ in examine.run((i, picture(i)) for i in range(50)):
                raise KeyboardInterrupt

    with pytest.raises(OSError, match="store"), decoder() as examine:
        list(examine.run(failing()))
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with decoder() as examine:
        assert list(examine.run([("a", picture(9))])) == [("a", decoded_here(picture(9)))]


def test_each_thread_has_its_own_child():
    """A thread that ends does not end a child that others use later."""
    found = {}

    def work(name):
        with decoder() as examine:
            found[name] = list(examine.run((i, picture(i + name)) for i in range(40)))

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, verdicts in found.items():
            assert verdicts == [(i, decoded_here(picture(i + name))) for i in range(40)]
        found.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children with their parent")
@pytest.mark.parametrize("busy", [False, True])
def test_no_orphan_survives_a_killed_parent(hostile, tmp_path, busy):
    """An idle child notices the end of its input; a child in an endless loop is ended by the kernel."""
    pid_file = tmp_path / "shared"
    image = b"pid:" if busy else picture(0)
    program = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
if __name__ == "__main__":
    with SandboxedDecoder(DecodePolicy(), timeout_s=600, memory_bytes={MEMORY}, function={hostile!r}) as examiner:
        for _ in examiner.run([(0, {image!r})]):
            open({str(pid_file)!r}, "w").write(str(examiner._child._process.pid))
            time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    try:
        child = int(eventually(lambda: pid_file.read_bytes().strip(b"\0 ")))
        assert not gone(child)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: gone(child))


def test_answers_survive_encoding_and_damaged_ones_are_refused():
    examined = examine_image(picture(5), POLICY)
    body = encode_examined(examined)
    assert decode_answer(Kind.EXAMINED, body) == examined
    rejected = decode_answer(Kind.REJECTED, "corrupt\0ä detail".encode())
    assert isinstance(rejected, ImageRejected)
    assert plain(rejected) == ("corrupt", "ä detail")
    damaged = [(Kind.EXAMINED, body[:n]) for n in range(body.index(b"PNG\0") + 4)]
    for kind, bad in [
        *damaged,
        (Kind.REJECTED, b"corrupt"),
        (Kind.REJECTED, b"invented\0"),
        (Kind.READY, b""),
        (77, b""),
    ]:
        with pytest.raises(ValueError, match="damaged answer"):
            decode_answer(kind, bad)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_decompression_bomb_is_refused_without_memory_for_its_pixels():
    """A PNG of 60,000 x 60,000 pixels, as a header only and with the first GB of its rows."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    def peak(pid):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes(20_000_000))
    bombs = [b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"") for body in (b"", rows * 50)]
    with SandboxedDecoder(DecodePolicy(), timeout_s=60, memory_bytes=MEMORY) as examine:
        list(examine.run([(0, picture(0))]))
        before = peak(examine._child._process.pid)
        verdicts = [verdict for _, verdict in examine.run(enumerate(bombs * 3))]
        after = peak(examine._child._process.pid)
    assert [verdict.reason for verdict in verdicts] == ["too_many_pixels"] * 6
    assert after - before < 4 * len(bombs[1]) + 8_000_000
