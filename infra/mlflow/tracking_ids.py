"""What a run is called on each MLflow server, agreed upon in the store by conditional writes (DESIGN 3.5).

`<root>/runs/<run key>/mlflow.json`: {"servers": {tracking URI: {"run": id, "url": page, ...}}}. Of several shippers that
made an MLflow run at once one finds its own here; the others delete theirs. Imports no MLflow.
"""

import json

from infra.redact import redact
from infra.storage import PreconditionFailed, Store, json_bytes

RUN = "run"
IDS_KEY = "mlflow.json"


def pipeline_ids_key(key: str) -> str:
    """Where the names of a pipeline's run are, below the root."""
    return f"tracking/pipelines/{key}/{IDS_KEY}"


def child_ids_key(slug: str) -> str:
    """Where the names of a part of a run are, below the run."""
    return f"tasks/{slug}/{IDS_KEY}"


class TrackingIds:
    """The names agreed upon for one run on one server, by kind: "run", "url", and those of its model."""

    def __init__(self, store: Store, server: str, key: str = IDS_KEY) -> None:
        self._store, self._server, self._key = store, redact(server.rstrip("/")), key

    def read(self) -> dict[str, str]:
        """All that is agreed upon; empty before the first."""
        return self._read()[0]["servers"].get(self._server, {})

    def agree(self, kind: str, name: str, instead_of: str | None = None, **beside: str) -> str:
        """The name that everybody uses: `name`, or the one that stands there already and is not `instead_of`.

        A new run takes the place of all names that belonged to the old one; `beside` is written with it.
        """
        while True:
            document, tag = self._read()
            mine = document["servers"].get(self._server, {})
            standing = mine.get(kind)
            if standing == name or standing not in (None, instead_of):
                return standing
            changed = ({} if kind == RUN else mine) | {kind: name, **beside}
            data = json_bytes({"schema_version": 1, "servers": document["servers"] | {self._server: changed}})
            try:
                _ = self._store.compare_and_swap(self._key, data, tag) if tag else self._store.create(self._key, data)
            except PreconditionFailed:
                continue  # someone else wrote in this moment, or our own write whose reply was lost: look again
            return name

    def _read(self) -> tuple[dict, str | None]:
        try:
            data, tag = self._store.read_tagged(self._key)
        except FileNotFoundError:
            return {"servers": {}}, None
        return json.loads(data), tag
