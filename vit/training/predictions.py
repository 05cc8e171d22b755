"""What a model said of every example of a split: one small Parquet file, kept beside the score that it explains.

Imports no torch: whoever only looks at predictions needs none.
"""

import hashlib
import io
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32, Int64

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("predicted", pa.int32(), nullable=False),
        pa.field("probability", pa.float32(), nullable=False),
        pa.field("loss", pa.float32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Predictions:
    """One entry for each of n examples, in order of their rows. An example is right where `predicted == label`."""

    row: Int64[np.ndarray, " n"]
    """Row in the split."""
    label: Int32[np.ndarray, " n"]
    """The class that the example counts for. Of several labels: the predicted one if it is among them, else the one of
    the largest weight, the first of equals."""
    predicted: Int32[np.ndarray, " n"]
    """The class of the largest logit."""
    probability: Float32[np.ndarray, " n"]
    """What the model gives the predicted class: of its softmax, or of its sigmoid where it was trained by that loss."""
    loss: Float32[np.ndarray, " n"]
    """Nats."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def right(self) -> np.ndarray:
        """bool (n,)."""
        return self.predicted == self.label

    @classmethod
    def joined(cls, parts: "list[Predictions]") -> "Predictions":
        """Parts of one split as one, in order of rows. Raises ValueError where a row comes twice."""
        columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        order = np.argsort(columns["row"], kind="stable")
        rows = columns["row"][order]
        if (again := rows[1:][rows[1:] == rows[:-1]]).size:
            raise ValueError(f"Row {again[0]} was predicted twice: every example of a split counts once.")
        return cls(**{name: values[order] for name, values in columns.items()})

    def to_parquet(self) -> bytes:
        """The file: equal predictions give equal bytes with one version of Arrow."""
        file = io.BytesIO()
        table = pa.table([getattr(self, name) for name in SCHEMA.names], schema=SCHEMA)
        pq.write_table(table, file, compression="zstd")
        return file.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes) -> "Predictions":
        table = pq.read_table(pa.BufferReader(data), schema=SCHEMA)
        return cls(**{name: table.column(name).to_numpy() for name in SCHEMA.names})

    @property
    def digest(self) -> str:
        """sha256 over the columns, whatever the file format; 64 hex digits."""
        digest = hashlib.sha256()
        for name in SCHEMA.names:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()
