"""Archives: well-formed, damaged and hostile ones."""

import io
import random
import struct
import tarfile
import zipfile
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitline.data_prep.archives.archive_members import CorruptArchive, Member, link_target
from vitline.data_prep.archives.archives import (
    index,
    member_pieces,
    open_members,
    read_members,
    read_tars_inside,
    stretches,
)
from vitline.infra.stores.memory_store import MemoryStore

from ....tars import link_of, tar_of

MAX_BYTES = 20_000
WINDOW_BYTES, NEAR_BYTES = 4 << 20, 1 << 20


class CountingStore(MemoryStore):
    """Remembers how much was read, and the largest read."""

    def __init__(self, name="archives"):
        super().__init__(name)
        self.num_bytes = self.largest = 0

    def read(self, key, start=0, end=None):
        data = super().read(key, start, end)
        self.num_bytes, self.largest = self.num_bytes + len(data), max(self.largest, len(data))
        return data


def stored(data, name="a.tar"):
    store = CountingStore()
    store.write(name, data)
    return store


def header(name=b"cat/1.jpg", size=b"00000000005\0", kind=b"0", link=b""):
    """A tar header with any fields and the right checksum."""
    block = bytearray(512)
    for at, value in ((0, name), (100, b"0000644\0"), (124, size), (156, kind), (157, link), (257, b"ustar\0" + b"00")):
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def zip_of(files, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return out.getvalue()


FILES = [(f"./cat/{'long name ' * (i % 20)}{i} é漢.jpg", random.Random(i).randbytes(i * 37 % 3000)) for i in range(60)]
PAIRS = [(name.removeprefix("./"), data) for name, data in FILES]
WRITERS = {
    "joined.tar": lambda: tar_of(FILES[:3]) + tar_of(FILES[3:5]) + tar_of(FILES[5:]),
    "pax.tar": lambda: tar_of(FILES),
    "gnu.tar": lambda: tar_of(FILES, tar_format=tarfile.GNU_FORMAT),
    "a.tar.gz": lambda: tar_of(FILES, mode="w:gz"),
    "two.TGZ": lambda: b"".join(gzipped(part) for part in halves(tar_of(FILES))),
    "not-compressed.tar.gz": lambda: tar_of(FILES),
    "stored.zip": lambda: zip_of(PAIRS),
    "deflated.zip": lambda: zip_of(PAIRS, zipfile.ZIP_DEFLATED),
    "unpacks-itself.zip": lambda: b"#!/bin/sh\n" + zip_of(PAIRS),
}


def gzipped(data):
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


def halves(data):
    return data[: len(data) // 2], data[len(data) // 2 :]


@pytest.mark.parametrize("name", WRITERS)
def test_read_members_returns_the_written_members(name):
    store = stored(WRITERS[name](), name)
    found = list(read_members(store, name, MAX_BYTES))
    assert [(member.path, data) for member, data in found] == PAIRS
    assert all(member.size == len(data) for member, data in found)
    ranged = [(member, data) for member, data in found if member.offset is not None]
    assert len(ranged) == (0 if name in ("a.tar.gz", "two.TGZ", "deflated.zip") else len(PAIRS))
    assert all(store.read(name, m.offset, m.offset + m.size) == data for m, data in ranged)
    assert [(m.path, m.size) for m in index(store, name)] == [(m.path, m.size) for m, _ in found]


@pytest.mark.parametrize(
    "name", ["pax.tar", "gnu.tar", "joined.tar", "stored.zip", "deflated.zip", "unpacks-itself.zip"]
)
@pytest.mark.parametrize("each", [1, 7, 1000])
def test_stretches_contain_every_member_once(name, each):
    store = stored(WRITERS[name](), name)
    cut = list(stretches(index(store, name), each))
    assert sum(s.num_bytes for s in cut) == sum(len(data) for _, data in PAIRS)
    parts = [list(read_members(store, name, MAX_BYTES, s.start, s.end, s.whole)) for s in cut]
    assert [len(part) for part in parts] == [s.num_members for s in cut]
    assert [found for part in parts for found in part] == list(read_members(store, name, MAX_BYTES))


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.zip"])
def test_a_member_that_is_too_large_is_read_up_to_the_limit(name):
    files = [("a/1.jpg", b"x" * 1000), ("a/2.jpg", b"y" * 1001), ("a/3.jpg", b"z" * 5000), ("a/4.jpg", b"w")]
    writer = {"a.tar": tar_of, "a.tgz": lambda f: tar_of(f, mode="w:gz"), "a.zip": zip_of}[name]
    found = list(read_members(stored(writer(files), name), name, 1000))
    assert [len(data) for _, data in found] == [1000, 1001, 1001, 1]
    assert [member.size for member, _ in found] == [1000, 1001, 5000, 1]


def test_each_byte_is_read_once_and_in_windows():
    store = stored(tar_of([(f"a/{i}.jpg", bytes(300_000)) for i in range(100)]))
    assert len(list(read_members(store, "a.tar", 1 << 20))) == 100
    assert store.num_bytes == store.size("a.tar")
    assert store.largest <= WINDOW_BYTES


def test_planning_does_not_read_large_members():
    store = stored(tar_of([(f"n{i}.tar", bytes(NEAR_BYTES * 2)) for i in range(20)]))
    assert len(list(index(store, "a.tar"))) == 20
    assert store.num_bytes < WINDOW_BYTES + 20 * 5000


def test_only_wanted_members_are_read():
    store = stored(tar_of(FILES))
    found = read_members(store, "a.tar", MAX_BYTES, wanted=lambda member: " 3" in member.path)
    assert {m.path: d for m, d in found if d is not None} == {p: d for p, d in PAIRS if " 3" in p}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_any_size_can_be_streamed(method):
    noise = random.Random(0).randbytes(9 << 20)
    large = noise + bytes(9 << 20)
    store = stored(zip_of([("cat.jpg", b"cat"), ("large", large), ("end", b"")], method), "a.zip")
    pieces = list(member_pieces(store, "a.zip", "large"))
    assert b"".join(pieces) == large
    assert max(map(len, pieces)) <= WINDOW_BYTES
    assert store.largest <= WINDOW_BYTES
    assert b"".join(member_pieces(store, "a.zip", "end")) == b""
    with pytest.raises(FileNotFoundError, match=r"a.zip!small"):
        next(member_pieces(store, "a.zip", "small"))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_streamed_member_is_checked_against_size_and_checksum_of_the_directory(method):
    data = random.Random(0).randbytes(5000) + bytes(WINDOW_BYTES * 3)
    whole = zip_of([("large", data)], method)
    entry = whole.rindex(b"PK\1\2")
    size, crc, flipped = bytearray(whole), bytearray(whole), bytearray(whole)
    size[entry + 24 : entry + 28] = struct.pack("<I", 4000)  # of 13 million bytes: unpacking stops one byte after it
    crc[entry + 16] ^= 1
    flipped[600] ^= 1
    for damaged in (size, crc, flipped):
        pieces = member_pieces(stored(bytes(damaged), "a.zip"), "a.zip", "large")
        found: list[bytes] = []
        with pytest.raises(CorruptArchive, match=r"a.zip at byte 0: large: (size or checksum|deflated data)"):
            found.extend(pieces)
        assert sum(map(len, found)) <= (4001 if damaged is size else len(data))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_members_of_a_tar_are_opened_and_unread_bytes_are_skipped(name):
    data = tar_of(
        [("one", b"1" * 700), ("two", b"2" * 3), ("three", b"3" * 1500)], mode="w:gz" if "gz" in name else "w"
    )
    found = []
    for member, source in open_members(stored(data, name), name, lambda member: member.path != "two"):
        found.append((member.path, source.take(5), source.remaining(source.position)))
        if member.path == "three":
            assert source.take(10_000) == b"3" * 1495
    assert found == [("one", b"11111", 695), ("three", b"33333", 1495)]
    with pytest.raises(CorruptArchive, match=r"truncated|are left"):
        list(open_members(stored(data[:100] if "gz" in name else data[:1000], name), name, lambda member: True))


def test_tars_inside_a_tar_are_opened_one_level_deep():
    inner = tar_of([("x/1.jpg", b"one"), ("deeper.tar", tar_of([("2.jpg", b"two")]))])
    outer = [("n1.tar", inner), ("readme", b"hello"), ("n2.tar", inner[:1030]), ("n3.tar", inner)]
    for name, mode in (("a.tar", "w"), ("a.tgz", "w:gz")):
        store = stored(tar_of(outer, mode=mode), name)
        found = list(read_tars_inside(store, name, MAX_BYTES, lambda member: member.path.endswith(".tar")))
        paths = [(member.path, inside and inside.path, inside and inside.kind) for member, inside, _ in found]
        good = lambda n: [(n, None, None), (n, "x/1.jpg", "file"), (n, "deeper.tar", "file")]  # noqa: E731
        assert paths[:4] == [*good("n1.tar"), ("readme", None, None)]
        assert paths[-3:] == good("n3.tar")
        assert [kind for path, _, kind in paths if path == "n2.tar"] == [None, "file", "damage"]


def test_names_with_backslashes_in_zips_are_paths():
    """As .NET and old PowerShell write them. On Unix a name may hold one; in a code page the byte may be half of a letter."""

    def paths(system, names):
        files = [(info := zipfile.ZipInfo("x"), b"%d" % i) for i in range(len(names))]
        for (info, _), name in zip(files, names, strict=True):
            info.filename, info.create_system = name, system
        return [m.path for m, _ in read_members(stored(zip_of(files), "a.zip"), "a.zip", MAX_BYTES) if not m.refused]

    names = ["pets\\", "pets\\cat\\1.jpg", "pets/dog\\2.jpg", "pets\\hünd\\3.jpg", "..\\4.jpg", "c:\\5.jpg", "\\6.jpg"]
    assert paths(0, names) == ["pets", "pets/cat/1.jpg", "pets/dog/2.jpg", "pets/hünd/3.jpg"]
    assert paths(3, names) == ["pets", "pets/cat/1.jpg", "pets/hünd/3.jpg"]


UNSAFE = ["../up.jpg", "/etc/passwd", "a/../../b.jpg", "a/b\\c.jpg", "C:x.jpg", "c:/x.jpg", "a/..", "x" * 5000]


@pytest.mark.parametrize("writer", [tar_of, zip_of])
@pytest.mark.parametrize("path", UNSAFE)
def test_paths_that_could_leave_the_folder_are_refused_and_not_read(writer, path):
    name = "a.tar" if writer is tar_of else "a.zip"
    files = [("a/1.jpg", b"1"), (path, b"evil"), ("a/2.jpg", b"2")]
    first, bad, last = read_members(stored(writer(files), name), name, MAX_BYTES)
    assert (first[1], bad[1], last[1]) == (b"1", None, b"2")
    assert bad[0].refused[0] == "unsafe_path"


@pytest.mark.parametrize("writer", [tar_of, zip_of])
def test_a_second_name_that_is_equal_in_nfc_is_refused(writer):
    name = "a.tar" if writer is tar_of else "a.zip"
    files = [("a/\u00fc.jpg", b"1"), ("a/u\u0308.jpg", b"2"), ("a/u.jpg", b"3")]
    found = read_members(stored(writer(files), name), name, MAX_BYTES)
    assert [data for member, data in found if not member.refused] == [b"1", b"3"]


def test_links_devices_and_sparse_files_are_reported():
    sparse = tarfile.TarInfo("a/hole.jpg")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/hole.jpg"}
    files = [
        ("a/1.jpg", b"1"),
        link_of("b/link.jpg", "../a/1.jpg"),
        link_of("b/hard.jpg", "a/1.jpg", tarfile.LNKTYPE),
        link_of("b/out.jpg", "../../1.jpg"),
        link_of("b/abs.jpg", "/a/1.jpg"),
        link_of("b/disk", "", tarfile.BLKTYPE),
        link_of("b/pipe", "", tarfile.FIFOTYPE),
        (sparse, b"data"),
        ("a/1.jpg", b"again"),
        ("b", b"x"),
    ]
    found = [member for member, _ in read_members(stored(tar_of(files)), "a.tar", MAX_BYTES)]
    targets = {m.path: link_target(m) for m in found if m.kind in ("link", "hard_link")}
    assert targets == {"b/link.jpg": "a/1.jpg", "b/hard.jpg": "a/1.jpg", "b/out.jpg": None, "b/abs.jpg": None}
    assert {m.path.split(" ")[0]: m.refused[0] for m in found if m.refused} == {
        "b/disk": "ignored_file",
        "b/pipe": "ignored_file",
        "a/hole.jpg": "damaged_archive",
        "a/1.jpg": "repeated_name",
    }
    assert [m.path for m in found if m.path.startswith("a/1.jpg")] == ["a/1.jpg", found[-2].path]


def test_an_old_gnu_sparse_file_is_skipped():
    block = bytearray(header(b"a/hole.jpg", b"00000000005\0", b"S"))
    block[257:265], block[482] = b"ustar  \0", 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    more_holes = bytes(512)
    data = bytes(block) + more_holes + b"holey".ljust(512, b"\0") + header() + b"after".ljust(512, b"\0") + bytes(1024)
    hole, after = read_members(stored(data), "a.tar", MAX_BYTES)
    assert hole[0].refused[0] == "damaged_archive"
    assert after[1] == b"after"


@pytest.mark.parametrize("name", ["gnu.tar", "pax.tar", "a.tar.gz"])
def test_a_truncated_archive_gives_its_readable_members_and_one_refusal(name):
    whole = WRITERS[name]()
    for length in (
        0,
        100,
        511,
        513,
        len(whole) // 2,
        len(whole) // 2 + 7,
        *range(len(whole) - 60_000, len(whole), 1111),
    ):
        store = stored(whole[: max(0, length)], name)
        *found, (last, nothing) = read_members(store, name, MAX_BYTES)
        assert [(member.path, data) for member, data in found] == PAIRS[: len(found)]
        if last.kind != "damage":  # the end marker is present, and only padding is missing
            assert (last.path, nothing) == PAIRS[-1]
        else:
            assert last.refused[0] == "uncounted_loss"
            assert f"memory://archives/{name} at byte " in last.refused[1]
            assert nothing is None


def test_false_sizes_in_headers_are_damage_and_cause_no_extra_reads():
    data, long_size = b"x" * 512, b"%011o\0" % (5 << 30)
    end = bytes(1024)
    for lease in (
        header(size=long_size) + data + end,
        header(size=b"\xff" * 12) + data + end,  # -1 in base 256
        header(size=b"\x80" + b"\xff" * 11) + data + end,
        header(size=b"-0000000001\0") + data + end,
        header(kind=b"L", size=long_size) + data + header() + data + end,
        header(kind=b"x", size=long_size) + data + header() + data + end,
        header(kind=b"x", size=b"%011o\0" % 17) + b"17 size=99999999\n".ljust(512, b"\0") + header() + data + end,
        header(kind=b"x", size=b"%011o\0" % 11) + b"11 size=-5\n".ljust(512, b"\0") + header() + data + end,
        header(kind=b"x", size=b"%011o\0" % 12) + b"99999999 a=b".ljust(512, b"\0") + header() + data + end,
        header(kind=b"g", size=b"%011o\0" % 12) + b"12 path=../\n".ljust(512, b"\0") + header() + data + end,
        header(kind=b"L") + b"name\0".ljust(512, b"\0") + end,
    ):
        store = stored(header() + b"first".ljust(512, b"\0") + lease)
        first, bad = read_members(store, "a.tar", MAX_BYTES)
        assert first[1] == b"first"
        assert bad[0].kind == "damage"
        assert store.num_bytes <= store.size("a.tar")


@pytest.mark.parametrize(
    ("tail", "why"),
    [(b"no tar" * 200, "follow the end-of-archive marker and are no tar"), (bytes(2 << 20), "incomplete download")],
)
def test_bytes_after_the_end_are_reported(tail, why):
    for name, pack in (("a.tar", bytes), ("a.tar.gz", gzipped)):
        *good, last = index(stored(pack(tar_of(FILES[:3]) + tail), name), name)
        assert len(good) == 3
        assert why in last.refused[1]


def test_appended_archives_are_divided_and_repeated_names_refused():
    store = stored(tar_of(FILES[:3]) * 2)
    for each in (1, 2, 100):
        cut = list(stretches(index(store, "a.tar"), each))
        assert sum(s.num_members for s in cut) == 6
        assert sum(len([*read_members(store, "a.tar", MAX_BYTES, s.start, s.end, s.whole)]) for s in cut) == 6
    refused = [member for member, _ in read_members(store, "a.tar", MAX_BYTES) if member.refused]
    assert [member.refused[0] for member in refused] == ["repeated_name"] * 3


def test_a_compressed_tar_with_a_wrong_name_is_an_error_with_a_hint():
    (only,) = index(stored(WRITERS["a.tar.gz"](), "a.tar"), "a.tar")
    assert ".tar.gz" in only.refused[1]


def test_zip_bombs_are_truncated_and_unreadable_entries_refused():
    bomb = zip_of([("a/bomb.jpg", bytes(50 << 20)), ("a/2.jpg", b"2")], zipfile.ZIP_DEFLATED)
    bomb_entry, second = read_members(stored(bomb, "a.zip"), "a.zip", MAX_BYTES)
    assert (len(bomb_entry[1]), second[1]) == (MAX_BYTES + 1, b"2")

    plain = bytearray(zip_of([("a/1.jpg", b"one"), ("a/2.jpg", b"two"), ("a/3.jpg", b"333")]))
    entries = [i for i in range(len(plain)) if plain[i : i + 4] == b"PK\1\2"]
    plain[entries[0] + 8] |= 1
    struct.pack_into("<H", plain, entries[1] + 10, 14)
    plain[entries[2] + 16] ^= 1
    refused = [m.refused for m, data in read_members(stored(bytes(plain), "a.zip"), "a.zip", MAX_BYTES) if data is None]
    assert [reason for reason, _ in refused] == ["unreadable", "unreadable", "damaged_archive"]
    assert [detail.split()[0] for _, detail in refused] == ["encrypted", "unsupported", "size"]

    same = bytearray(zip_of([("a/1.jpg", b"x" * 500), ("a/2.jpg", b"y" * 500)]))
    entries = [i for i in range(len(same)) if same[i : i + 4] == b"PK\1\2"]
    struct.pack_into("<I", same, entries[1] + 42, 0)
    good, overlapping = read_members(stored(bytes(same), "a.zip"), "a.zip", MAX_BYTES)
    assert good[1] == b"x" * 500
    assert overlapping[0].refused == ("damaged_archive", "the member overlaps another zip member")

    many = zip_of([(f"a/{i}.jpg", b"x" * 5000) for i in range(3)])
    directory = bytearray(many[many.index(b"PK\1\2") :])
    begin = len(many) - len(directory)
    repeated = bytes(directory[:-22]) * 3  # nine entries that share the bytes of three
    ending = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 9, 9, len(repeated), begin, 0)
    *_, last = read_members(stored(many[:begin] + repeated + ending, "a.zip"), "a.zip", MAX_BYTES)
    assert last[0].kind == "damage"
    assert "overlap" in last[0].refused[1]


def test_zip64_entries_links_and_legacy_names_are_read():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        with archive.open("a/1.jpg", "w", force_zip64=True) as file:
            file.write(b"one")
        link = zipfile.ZipInfo("b/link.jpg")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "../a/1.jpg")
    store = stored(out.getvalue(), "a.zip")
    assert [data for _, data in read_members(store, "a.zip", MAX_BYTES)] == [b"one", None]
    assert [link_target(m) for m in index(store, "a.zip") if m.kind == "link"] == ["a/1.jpg"]

    utf8, dos = "a/é.jpg".encode(), "a/é.jpg".encode("cp437")
    for name in (utf8, dos):  # without the UTF-8 flag, as macOS and DOS write them
        data = zip_of([("a/" + "x" * (len(name) - 6) + ".jpg", b"1")]).replace(
            b"a/" + b"x" * (len(name) - 6) + b".jpg", name
        )
        assert [m.path for m in index(stored(data, "a.zip"), "a.zip")] == ["a/é.jpg"]


def test_a_zip64_directory_is_found():
    """Like that of a zip with more than 65,535 entries and other bytes before the archive."""
    plain = zip_of(PAIRS)
    at, (number, _, length, offset) = len(plain) - 22, struct.unpack("<HHII", plain[-14:-2])
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, number, number, length, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    ending = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    for before in (b"", b"#!/bin/sh\n"):
        data = before + plain[:at] + record + locator + ending
        with zipfile.ZipFile(io.BytesIO(data)) as reference:
            assert len(reference.infolist()) == number
        assert [d for _, d in read_members(stored(data, "a.zip"), "a.zip", MAX_BYTES)] == [d for _, d in PAIRS]


# Fuzzing --------------------------------------------------------------------------------------------------------------

SMALL = [(f"cat/{i}.jpg", bytes([i]) * (i * 211 % 2000)) for i in range(12)]
SEEDS = [
    ("a.tar", tar_of([*SMALL, link_of("l", "cat/1.jpg"), ("y" * 200, b"long")])),
    ("a.tar", tar_of([*SMALL, ("y" * 200, b"long")], tar_format=tarfile.GNU_FORMAT)),
    ("a.tar", tar_of([("n1.tar", tar_of(SMALL)), ("n2.tar", tar_of([("n3.tar", tar_of(SMALL))]))])),
    ("a.tgz", tar_of(SMALL, mode="w:gz")),
    ("a.zip", zip_of(SMALL)),
    ("a.zip", zip_of(SMALL, zipfile.ZIP_DEFLATED)),
]
LEASES = st.builds(
    header,
    name=st.sampled_from([b"../x", b"/x", b"a\\b", b"cat/1.jpg", b"\xff\xfe", b"", b"cat/", b"."]),
    size=st.sampled_from(
        [b"%011o\0" % n for n in (0, 5, 600, 1 << 20, 8 << 30)] + [b"\xff" * 12, b"\x80" + b"\x7f" * 11]
    ),
    kind=st.sampled_from([bytes([c]) for c in b"01234567xgLKSDMVX\0"]),
    link=st.sampled_from([b"", b"cat/1.jpg", b"../..", b"/etc"]),
)
DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("flip"), st.floats(0, 1), st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("over"), st.floats(0, 1), st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("block"), st.floats(0, 1), LEASES),
    st.tuples(st.just("in"), st.floats(0, 1), LEASES),
)


def damaged(data, kind, where, what):
    at = int(where * len(data))
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes(a ^ b for a, b in zip(data[at : at + 1], what, strict=False)) + data[at + 1 :]
    block = at // 512 * 512
    if kind == "in":
        return data[:block] + what + data[block:]
    return data[: block if kind == "block" else at] + what + data[(block if kind == "block" else at) + len(what) :]


def check_hostile(name, data):
    """Only members are returned, each safe or refused, and little is read for them."""
    store = stored(data, name)
    found = list(read_members(store, name, MAX_BYTES))
    assert store.num_bytes <= 2 * len(data) + 200_000  # of a zip: its end, its directory and its members
    assert store.largest <= WINDOW_BYTES + MAX_BYTES
    for member, got in found:
        assert got is None or (member.kind == "file" and not member.refused and len(got) <= MAX_BYTES + 1)
        if got is not None:
            assert not member.path.startswith("/")
            assert not {"..", "", "."} & set(member.path.split("/"))
            assert not set("\\\0") & set(member.path)
            if member.offset is not None:
                assert data[member.offset : member.offset + len(got)] == got
        member.path.encode()
    assert all(member.kind != "damage" for member, _ in found[:-1])
    assert len({member.path for member, _ in found if member.kind != "folder"}) == sum(
        member.kind != "folder" for member, _ in found
    )
    listed = list(index(store, name))
    if name != "a.tgz":
        cut = list(stretches(listed, 3))
        again = [pair for s in cut for pair in read_members(store, name, MAX_BYTES, s.start, s.end, s.whole)]
        assert sum(data is not None for _, data in again) >= sum(data is not None for _, data in found)
    for _ in read_tars_inside(store, name, MAX_BYTES, lambda member: True) if name != "a.zip" else ():
        pass


cases = given(seed=st.sampled_from(SEEDS), damage=st.lists(DAMAGE, min_size=1, max_size=4))


def fuzz(seed, damage):
    name, data = seed
    for step in damage:
        data = damaged(data, *step)
    check_hostile(name, data)


QUICK = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=300, **QUICK)
@cases
def test_damaged_archives_raise_no_other_errors(seed, damage):
    fuzz(seed, damage)


@pytest.mark.slow
@settings(max_examples=2500, **QUICK)
@cases
def test_many_damaged_archives_raise_no_other_errors(seed, damage):
    fuzz(seed, damage)


def test_the_refusal_of_a_damaged_archive_names_archive_and_byte():
    (member,) = index(stored(b"no archive" * 100), "a.tar")
    assert member == Member("(damaged at byte 0)", kind="damage", refused=member.refused)
    assert member.refused[1].startswith("memory://archives/a.tar at byte 0: invalid tar header")
