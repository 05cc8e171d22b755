"""Arrays: pixels are unchanged, ids and splits are those of the data sets, and damage is reported."""

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.config import CorpusRecipe, ImageArrays
from vitline.data_prep.decode import decode
from vitline.data_prep.sources.arrays.image_arrays import ImageArraysCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ....tars import tar_of

NO_HASHING = CorpusRecipe(val_fraction=0, test_fraction=0)


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def read(memory_root):
    """The examples of an array source as (id, split, label, pixels); refused ones have their reason instead of pixels."""

    def make(path, layout, recipe=NO_HASHING):
        source = ImageArrays(path=str(path), layout=layout)
        work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/work"), 100)
        parts = list(ImageArraysCorpus(source, recipe).parts(work))
        found, fresh = [], ImageArraysCorpus(source, recipe)
        for part in parts:
            examples = list(fresh.examples(part, work))
            assert len(examples) == part.num_examples
            for example in examples:
                file = open_store(example.base).read(
                    example.key, example.offset, example.offset + (example.length or 0)
                )
                assert (example.data or b"") == file
                image = example.refused[0] if example.refused else np.array(Image.open(io.BytesIO(file)))
                found.append((example.example_id, example.split, "".join(example.labels), image))
        return found

    return make


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (5, 7, 3), (300, 301, 3)])
def test_lossless_png_decodes_to_the_original_pixels(shape):
    image = pixels(0, *shape)
    file = lossless_png(image)
    with Image.open(io.BytesIO(file)) as opened:
        opened.verify()
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(file))), image)
    rgb = decode(file)
    np.testing.assert_array_equal(rgb, image if image.ndim == 3 else np.repeat(image[..., None], 3, -1))


def test_png_of_one_pixel_has_fixed_bytes():
    """Written by hand, so nothing depends on the version of a library."""
    assert lossless_png(np.array([[7]], np.uint8)).hex() == (
        "89504e470d0a1a0a"
        "0000000d49484452" + "0000000100000001" + "0800000000" + "3a7e9b55"
        "0000000d49444154"
        + "7801"
        + "010200fdff"
        + "0007"
        + "00090008"
        + f"{_crc(b'IDAT', '7801010200fdff000700090008')}"
        "0000000049454e44ae426082"
    )


def _crc(kind, data):
    state = 0xFFFFFFFF
    for byte in kind + bytes.fromhex(data):
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0xEDB88320 if state & 1 else 0)
    return f"{state ^ 0xFFFFFFFF:08x}"


def cifar_records(labels, first):
    """Records of planar images with one or two labels."""
    return b"".join(
        bytes(label) + pixels(first + i, 32, 32, 3).transpose(2, 0, 1).tobytes() for i, label in enumerate(labels)
    )


@pytest.fixture
def cifar10(tmp_path):
    names = "\n".join(
        ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck", "", ""]
    )
    files = {
        f"cifar-10-batches-bin/data_batch_{b}.bin": cifar_records([[b], [9]], 2 * (b - 1)) for b in (4, 1, 2, 5, 3)
    }
    files["cifar-10-batches-bin/test_batch.bin"] = cifar_records([[3]], 100)
    files = {"cifar-10-batches-bin/batches.meta.txt": names.encode(), **files}
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(tar_of(files, "w:gz"))
    return path


def test_cifar_10_ids_count_through_the_batches_in_order(cifar10, read):
    found = {example_id: rest for example_id, *rest in read(cifar10, "cifar10")}
    assert sorted(found) == ["test/00000", *(f"train/{i:05d}" for i in range(10))]
    for i in range(10):
        split, label, image = found[f"train/{i:05d}"]
        assert (split, label) == ("train", f"{9 if i % 2 else i // 2 + 1:06d}")
        np.testing.assert_array_equal(image, pixels(i, 32, 32, 3))
    assert found["test/00000"][:2] == ["test", "000003"]
    np.testing.assert_array_equal(found["test/00000"][2], pixels(100, 32, 32, 3))
    corpus = ImageArraysCorpus(ImageArrays(path=str(cifar10), layout="cifar10"), NO_HASHING)
    assert [corpus.class_info(f"{i:06d}").name for i in (0, 9)] == ["airplane", "truck"]


def test_val_is_drawn_from_train_and_test_is_unchanged(cifar10, read):
    splits = {example_id: split for example_id, split, *_ in read(cifar10, "cifar10", CorpusRecipe(val_fraction=0.5))}
    assert splits.pop("test/00000") == "test"
    assert set(splits.values()) == {"train", "val"}


@pytest.mark.parametrize(("layout", "labels"), [("cifar100", "000099"), ("cifar100_coarse", "000003")])
def test_cifar_100_has_two_labels(tmp_path, read, layout, labels):
    path = tmp_path / "c100.tgz"
    fine, coarse = ("\n".join(f"{kind} {i}" for i in range(n)).encode() for kind, n in (("fine", 100), ("coarse", 20)))
    files = {"a/train.bin": cifar_records([[3, 99]], 0), "a/test.bin": cifar_records([[3, 99], [200, 201]], 5)}
    path.write_bytes(tar_of(files | {"a/fine_label_names.txt": fine, "a/coarse_label_names.txt": coarse}, "w:gz"))
    found = read(path, layout)
    assert [example[:3] for example in found[:2]] == [("train/00000", "train", labels), ("test/00000", "test", labels)]
    assert found[2][3] == "no_label"
    corpus = ImageArraysCorpus(ImageArrays(path=str(path), layout=layout), NO_HASHING)
    assert corpus.class_info(labels).name in ("fine 99", "coarse 3")


def test_files_that_are_not_cifar_archives_are_refused(cifar10, read):
    data = cifar10.read_bytes()
    wrong = {
        data[:-9]: "truncated|Compressed file ended",
        data[: len(data) // 2]: "truncated|Compressed file ended",
        data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]: "CRC check failed",
        tar_of({"x/data_batch_1.bin": b"\0" * 3073}, "w:gz"): "lacks data_batch_2.bin, .* consists of pickles",
        tar_of({"x/data_batch_1.bin": b"\0" * 3000}, "w:gz"): "data_batch_1.bin with 3,000 bytes",
        b"not an archive": "cannot be read|invalid gzip|Not a gzipped",
    }
    for content, message in wrong.items():
        cifar10.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read(cifar10, "cifar10")
    with pytest.raises(ValueError, match="There is no file"):
        ImageArraysCorpus(ImageArrays(path=f"{cifar10}x", layout="cifar10"), NO_HASHING).fingerprint()


def idx(array, kind=0x08):
    array = np.asarray(array)
    big = {0x08: ">u1", 0x0C: ">i4", 0x0D: ">f4"}[kind]
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.astype(big).tobytes()


@pytest.mark.parametrize("shape", [(28, 28), (6, 5, 3), (3, 6, 5), (6, 5, 1)])
def test_idx_files_are_read_plain_and_compressed(tmp_path, read, shape):
    train, test = pixels(0, 4, *shape), pixels(1, 2, *shape)
    axes = train.ndim
    (tmp_path / f"train-images-idx{axes}-ubyte.gz").write_bytes(gzip.compress(idx(train)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx([7, 0, 1, 9]))
    (tmp_path / f"t10k-images.idx{axes}-ubyte").write_bytes(idx(test))
    (tmp_path / "t10k-labels.idx1-ubyte.gz").write_bytes(gzip.compress(idx([-1, 5], 0x0C)))
    (tmp_path / "README").write_bytes(b"")
    found = {example_id: rest for example_id, *rest in read(tmp_path, "idx")}
    assert {key: value[:2] for key, value in found.items()} == {
        **{f"train/{i:05d}": ["train", f"{label:06d}"] for i, label in enumerate((7, 0, 1, 9))},
        "test/00000": ["test", ""],
        "test/00001": ["test", "000005"],
    }
    assert found["test/00000"][2] == "no_label"
    expected = train.transpose(0, 2, 3, 1) if shape[0] == 3 else train.reshape(4, *shape[:2], -1)
    for i in range(4):
        np.testing.assert_array_equal(found[f"train/{i:05d}"][2].reshape(expected[i].shape), expected[i])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx(np.zeros((2, 3, 5, 3))), idx([0, 1]), r"shape \(2, 3, 5, 3\); expected"),
        (idx(np.zeros((2, 5, 5, 4))), idx([0, 1]), r"shape \(2, 5, 5, 4\)"),
        (idx(np.zeros((2, 25))), idx([0, 1]), r"shape \(2, 25\)"),
        (idx(np.zeros((2, 0, 5))), idx([0, 1]), "5 x 0 pixels"),
        (idx(np.zeros((2, 5, 5)), 0x0D), idx([0, 1]), "the value range of float pixels is not defined"),
        (idx(np.zeros((2, 5, 5))), idx([0, 1, 2]), r"labels of type uint8 and shape \(3,\)"),
        (idx(np.zeros((2, 5, 5))), idx([0, 1], 0x0D), "labels of type >f4"),
        (idx(np.zeros((2, 5, 5)))[:-1], idx([0, 1]), "50 bytes, but holds 49"),
        (idx(np.zeros((2, 5, 5))) + b"x", idx([0, 1]), "50 bytes, but holds 51"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31), idx([0]), "holds at most 0"),
        (b"\0\0\x08", idx([0]), "truncated within its header"),
        (b"PNG...........", idx([0]), "which is not valid for idx"),
    ],
)
def test_unsupported_idx_files_are_refused(tmp_path, read, images, labels, message):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "idx")


@pytest.mark.parametrize("at", [-30, -6, 200])
def test_a_damaged_compressed_array_is_an_error_and_no_partial_result(tmp_path, read, at):
    packed = bytearray(gzip.compress(idx(pixels(0, 9, 9, 9))))
    packed[at] ^= 1
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(packed)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(range(9)))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is damaged: .*Copy it again|expected"):
        read(tmp_path, "idx")


def test_idx_folders_with_several_data_sets_are_refused(tmp_path, read):
    with pytest.raises(ValueError, match="is not a folder with idx files"):
        read(tmp_path, "idx")
    (tmp_path / "a-train-images-idx3-ubyte").write_bytes(idx(np.zeros((1, 2, 2))))
    with pytest.raises(ValueError, match="no a-train-labels-idx1-ubyte"):
        read(tmp_path, "idx")
    (tmp_path / "a-train-labels-idx1-ubyte").write_bytes(idx([0]))
    assert [example[:2] for example in read(tmp_path, "idx")] == [("train/00000", "train")]
    (tmp_path / "b-train-images-idx3-ubyte").write_bytes(idx(np.zeros((1, 2, 2))))
    (tmp_path / "b-train-labels-idx1-ubyte").write_bytes(idx([0]))
    with pytest.raises(ValueError, match="several arrays of one split"):
        read(tmp_path, "idx")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_written_by_numpy_is_read(tmp_path, read, save):
    train, test = pixels(0, 3, 6, 5, 3), pixels(1, 2, 3, 6, 5)
    path = tmp_path / "a.npz"
    save(path, x_train=train, y_train=np.array([[2], [0], [1]]), x_test=test, y_test=np.uint8([4, 5]), other=["text"])
    found = read(path, "npz")
    assert [example[:3] for example in found] == [
        ("train/00000", "train", "000002"),
        ("train/00001", "train", "000000"),
        ("train/00002", "train", "000001"),
        ("test/00000", "test", "000004"),
        ("test/00001", "test", "000005"),
    ]
    np.testing.assert_array_equal([image for *_, image in found], [*train, *test.transpose(0, 2, 3, 1)])


def test_npz_may_have_no_splits_or_three(tmp_path, read):
    path = tmp_path / "a.npz"
    np.savez(path, images=pixels(0, 40, 4, 4), labels=np.arange(40))
    found = read(path, "npz", CorpusRecipe(val_fraction=0.3, test_fraction=0.3))
    assert {example[1] for example in found} == {"train", "val", "test"}
    assert found[7][0] == "images/00007"
    sets = {f"{s}_images": pixels(i, 2, 4, 4, 1) for i, s in enumerate(("train", "val", "test"))}
    np.savez(path, **sets, **{f"{s}_labels": np.zeros((2, 1), np.uint8) for s in ("train", "val", "test")})
    assert {example[:2] for example in read(path, "npz")} == {
        (f"{s}/0000{i}", s) for s in sets_of(sets) for i in (0, 1)
    }


def sets_of(arrays):
    return [name.removesuffix("_images") for name in arrays]


class Trap:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def test_unsupported_npz_is_refused(tmp_path, read):
    path, labels = tmp_path / "a.npz", np.arange(2)
    images = pixels(0, 2, 4, 5)
    for arrays, message in [
        ({"images": np.array([Trap(), Trap()], object), "labels": labels}, "an array of Python objects"),
        ({"images": np.asfortranarray(images), "labels": labels}, "in Fortran order"),
        ({"images": images / 255, "labels": labels}, "pixels of type float64, which is not supported: the value range"),
        ({"images": images.astype(np.uint16), "labels": labels}, "pixels of type uint16"),
        ({"images": images, "labels": np.eye(2)}, "labels of type float64"),
        ({"pictures": images}, "holds the arrays pictures; expected"),
        ({"images": images, "labels": labels, "x_train": images, "y_train": labels}, "expected"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            read(path, "npz")
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is damaged: File is not a zip file"):
        read(path, "npz")


def test_npz_headers_are_verified(tmp_path, read):
    path = tmp_path / "a.npz"
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 4, 5)}".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + bytes(40))
        archive.writestr("labels.npy", b"")
    with pytest.raises(ValueError, match=r"1,999,999,999,980 bytes, but holds 40"):
        read(path, "npz")


def test_any_flipped_byte_of_an_npz_gives_the_right_pixels_or_an_error(tmp_path, read):
    images = pixels(0, 3, 4, 5)
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=images, labels=np.arange(3))
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = read(path, "npz")
        except ValueError:
            continue
        np.testing.assert_array_equal([image for *_, image in found], images)


def test_arrays_can_be_read_from_any_store(cifar10, memory_root, read):
    store = open_store(f"{memory_root}-copy")
    store.write("sub/c.tar.gz", cifar10.read_bytes())
    local, remote = read(cifar10, "cifar10"), read(f"{store.uri}/sub/c.tar.gz", "cifar10")
    assert [example[:3] for example in local] == [example[:3] for example in remote]
    first = ImageArraysCorpus(ImageArrays(path=f"{store.uri}/sub/c.tar.gz", layout="cifar10"), NO_HASHING).fingerprint()
    store.write("sub/c.tar.gz", cifar10.read_bytes() + b"\0")
    again = ImageArraysCorpus(ImageArrays(path=f"{store.uri}/sub/c.tar.gz", layout="cifar10"), NO_HASHING).fingerprint()
    assert first != again
