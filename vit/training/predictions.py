"""The predictions of a model for every example of a split: one small Parquet file, stored beside its score.

Imports no torch, so predictions can be read without it.
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
    """One entry for each of n examples, in row order. A prediction is correct where `predicted == label`."""

    row: Int64[np.ndarray, " n"]
    """Row in the split."""
    label: Int32[np.ndarray, " n"]
    """The class of the example. Of several labels: the predicted class if it is one of them, else the label with the
    largest weight (the first of equal ones)."""
    predicted: Int32[np.ndarray, " n"]
    """The class with the largest logit."""
    probability: Float32[np.ndarray, " n"]
    """Probability of the predicted class: by softmax, or by sigmoid if the model was trained with the sigmoid loss."""
    loss: Float32[np.ndarray, " n"]
    """Loss of the example, in nats."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def right(self) -> np.ndarray:
        """bool (n,)."""
        right: np.ndarray = self.predicted == self.label
        return right

    @classmethod
    def joined(cls, parts: "list[Predictions]") -> "Predictions":
        """Joins parts of one split, in row order. Raises ValueError if a row occurs twice."""
        columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        order = np.argsort(columns["row"], kind="stable")
        rows = columns["row"][order]
        if (again := rows[1:][rows[1:] == rows[:-1]]).size:
            raise ValueError(f"Row {again[0]} has two predictions, but every example of a split must count once.")
        return cls(**{name: values[order] for name, values in columns.items()})

    def to_parquet(self) -> bytes:
        """The bytes of the Parquet file. They are a function of the predictions and the version of Arrow."""
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
        """sha256 of the columns, independent of the file format; 64 hex digits."""
        digest = hashlib.sha256()
        for name in SCHEMA.names:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()
