import io
import re
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.parquet_files import RowGroupFile, read_table
from vitline.infra.storage import open_store

ROOMS = [Path(__file__).parents[2] / room for room in ("data_prep", "flows", "infra", "vit")]
ROWS = pa.table(
    {"image": [b"x" * 999, b"y" * 999, b"z"], "label": [1, 2, 3], "tags": [["a"], [], ["b"]], "name": ["p", "q", "r"]}
)


class CountedReads(io.BytesIO):
    """Counts reads, and fails in a thread of Arrow, as Python does at exit."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads, self._thread = 0, threading.get_ident()

    def read(self, size=-1):
        assert threading.get_ident() == self._thread
        self.reads += 1
        return super().read(size)


@pytest.fixture
def file():
    sink = io.BytesIO()
    pq.write_table(ROWS, sink, row_group_size=2, write_page_checksum=True, use_dictionary=["name"])
    return CountedReads(sink.getvalue())


def test_columns_come_in_the_requested_order(file, memory_root):
    store = open_store(memory_root)
    store.write("a.parquet", file.getvalue())
    assert read_table(store, "a.parquet", ["tags", "label"]) == ROWS.select(["tags", "label"])
    assert read_table(store, "a.parquet") == ROWS


@pytest.mark.parametrize("columns", [None, ["image", "label"], ["label", "name"], ["tags"], ["name"]])
def test_columns_of_a_row_group_come_with_one_read_in_the_calling_thread(file, columns):
    expected = ROWS if columns is None else ROWS.select(columns)
    with RowGroupFile(file) as parquet:
        for group, rows in enumerate((expected.slice(0, 2), expected.slice(2))):
            file.reads = 0
            assert parquet.row_group(group, columns) == rows
            assert file.reads <= 1
        with pytest.raises(IndexError):
            parquet.row_group(2)
    assert file.closed


@pytest.mark.parametrize("columns", [None, ["image", "label"], ["tags"]])
def test_a_footer_reads_row_groups_of_a_closed_file_with_one_read_each(file, columns):
    data, reads = file.getvalue(), []
    with RowGroupFile(file) as parquet:
        footer = parquet.footer()

    def read(start, end):
        reads.append((start, end))
        return data[start:end]

    expected = ROWS if columns is None else ROWS.select(columns)
    assert footer.row_group(1, columns, read) == expected.slice(2)
    assert footer.row_group(0, columns, read) == expected.slice(0, 2)
    assert len(reads) == 2
    assert reads[0] > reads[1]
    with pytest.raises(OSError, match=r"(?i)corrupt"):
        footer.row_group(1, columns, lambda start, end: data[start : end - 1])


def test_a_changed_byte_is_found(file):
    with RowGroupFile(file) as parquet:
        image = parquet.metadata.row_group(0).column(0)
        file.getbuffer()[image.data_page_offset + image.total_compressed_size - 1] ^= 1
        with pytest.raises(OSError, match="CRC"):
            parquet.row_group(0, ["image"])


def test_parquet_is_opened_only_where_nothing_reads_ahead():
    """A thread of Arrow that reads ahead from a Python file can abort the process at exit: in 54 of 160 runs."""
    calls = [
        f"{path.name}: {call}"
        for room in ROOMS
        for path in room.rglob("*.py")
        for call in re.findall(r"\bpq\.(?:ParquetFile\(|read_table\((?!pa\.BufferReader\()).*", path.read_text())
    ]
    assert calls == [
        "parquet_files.py: pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True, **options)"
    ]
