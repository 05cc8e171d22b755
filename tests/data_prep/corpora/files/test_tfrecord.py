"""TFRecord frames and tf.train.Example against golden values and the protobuf classes of TensorFlow Datasets."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.data_prep.archives import tfrecord
from vitline.data_prep.archives.archive_bytes import Gunzipped, RangeReader
from vitline.data_prep.archives.tfrecord import DamagedFile, crc32c, frames, frames_inside, read_example
from vitline.infra.storage import open_store

from ....tars import framed


def crc_by_bits(data):
    """By the definition, one bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.fixture
def store(memory_root):
    return open_store(memory_root)


def test_checksums_equal_the_examples_of_the_standard():
    """RFC 3720, B.4, and the usual check value of CRC-32C."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1023, 1024, 1025, 3000, 128 * 1024 + 1])
def test_checksums_of_every_length(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert crc32c(data) == crc_by_bits(data)


def test_frame_header_equals_the_one_that_tensorflow_writes():
    """Every event file of TensorBoard begins with these twelve bytes: the header of a record of 24 bytes."""
    assert framed([bytes(24)], crc_by_bits)[:12] == b'\x18\0\0\0\0\0\0\0\xa3\x7fK"'


def test_every_record_is_at_the_offset_of_its_frame(store):
    payloads = [b"", b"a", b"b" * 5000, bytes(range(256)) * 9]
    data = framed(payloads, crc_by_bits)
    store.write("f", data)
    found = list(frames(store, "f"))
    assert [frame.payload for frame in found] == payloads
    assert [data[frame.offset : frame.offset + frame.length] for frame in found] == payloads


def test_a_damaged_payload_does_not_affect_others(store):
    data = bytearray(framed([b"one", b"two", b"three"], crc_by_bits))
    data[data.index(b"two")] ^= 1
    store.write("f", bytes(data))
    one, two, three = frames(store, "f")
    assert (one.payload, three.payload) == (b"one", b"three")
    assert two.damage == f"{store.uri}/f: checksum of the record at byte {data.index(b'uwo')} does not match"


def test_a_damaged_length_or_a_truncated_file_is_an_error_with_its_name(store):
    whole = framed([b"one", b"two"], crc_by_bits)
    cut, flipped, second = whole[:-1], bytearray(whole), len(framed([b"one"], crc_by_bits))
    flipped[second] ^= 4
    for name, data, message in [
        ("cut", cut, f"/cut: the record at byte {second + 12} has 3 bytes, but the file ends at byte {len(cut)}"),
        ("head", whole[: second + 5], f"/head ends within a record header at byte {second}"),
        ("flip", bytes(flipped), f"/flip: the length at byte {second} does not match its checksum"),
    ]:
        store.write(name, data)
        read = frames(store, name)
        assert next(read).payload == b"one"
        with pytest.raises(DamagedFile, match=message):
            next(read)
    store.write("gz", gzip.compress(whole))
    with pytest.raises(ValueError, match="compressed, which is not supported") as caught:
        next(frames(store, "gz"))
    assert not isinstance(caught.value, DamagedFile)


@pytest.mark.parametrize("packed", [True, False])
def test_records_inside_an_archive_equal_those_of_a_file(store, monkeypatch, packed):
    payloads = [b"", b"a", b"b" * 5000, b"too large" * 1000, bytes(range(256)) * 9]
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 8999)
    data = framed(payloads, crc_by_bits)
    store.write("plain", data)
    around = b"before" + data + b"behind"
    store.write("f", gzip.compress(around) if packed else around)
    source = Gunzipped(store, "f") if packed else RangeReader(store, "f")
    source.skip_to(6)
    assert list(frames_inside(source, "a.tar!f", len(data))) == list(frames(store, "plain"))
    assert source.take(6) == b"behind"
    source = Gunzipped(store, "f") if packed else RangeReader(store, "f")
    source.skip_to(6)
    with pytest.raises(DamagedFile, match=r"a.tar!f: the record at byte \d+ has 2,304 bytes, but the file ends"):
        list(frames_inside(source, "a.tar!f", len(data) - 1))


def test_a_record_that_is_too_large_is_skipped(store, monkeypatch):
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 10)
    store.write("f", framed([b"x" * 11, b"y" * 10], crc_by_bits))
    large, right = frames(store, "f")
    assert (large.payload, large.damage, right.payload) == (b"", "11 bytes, limit 10", b"y" * 10)


@pytest.fixture(scope="module")
def protobuf():
    return pytest.importorskip(
        "tensorflow_datasets.proto", reason="tensorflow-datasets is not installed"
    ).tf_example_pb2


FEATURES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.lists(st.binary(max_size=300), max_size=3).map(lambda values: ("bytes", values)),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: ("int64", values)),
        st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(lambda values: ("float", values)),
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(features=FEATURES)
def test_example_written_by_protobuf_is_read(protobuf, features):
    example = protobuf.Example()
    for name, (kind, values) in features.items():
        getattr(example.features.feature[name], f"{kind}_list").value.extend(values)
        getattr(example.features.feature[name], f"{kind}_list").SetInParent()
    payload = example.SerializeToString()
    found = read_example(payload, features)
    read = {
        name: (feature.kind, [payload[v] for v in feature.values] if feature.kind == "bytes" else feature.values)
        for name, feature in found.items()
    }
    assert read == features
    assert read_example(payload, frozenset()) == {}


def test_unpacked_numbers_and_repeated_fields_are_read():
    """Feature 'n' is twice in one map entry, its numbers are single varints; an unknown field is skipped."""
    numbers = bytes([0x1A, 4, 0x08, 5, 0x08, 7])
    entry = b"\x0a\x01n" + b"\x12" + bytes([len(numbers)]) + numbers + b"\x12\x04\x1a\x02\x08\x09"
    features = b"\x0a" + bytes([len(entry)]) + entry
    payload = b"\x50\x01" + b"\x0a" + bytes([len(features)]) + features
    assert read_example(payload, {"n"})["n"].values == [5, 7, 9]


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_examples_are_read_or_refused(protobuf, data):
    example = protobuf.Example()
    example.features.feature["image"].bytes_list.value.append(b"picture")
    example.features.feature["label"].int64_list.value.extend([3, -1])
    whole = bytearray(example.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    payload = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = read_example(payload, {"image", "label"})
    except ValueError:
        return
    for feature in found.values():
        if feature.kind == "bytes":
            assert all(0 <= v.start <= v.stop <= len(payload) for v in feature.values)
