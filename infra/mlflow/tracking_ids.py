"""The MLflow ids of a run on each server, stored by conditional writes.

`<root>/runs/<run key>/mlflow.json`: {"servers": {tracking URI: {"run": id, "url": page, ...}}}. If several shippers create
an MLflow run at once, the one whose id is stored here keeps it and the others delete theirs. Imports no MLflow.
"""

import json
from typing import NotRequired, TypedDict

from vitline.infra.redact import redact
from vitline.infra.storage import PreconditionFailed, Store, json_bytes

RUN = "run"
IDS_KEY = "mlflow.json"


def pipeline_ids_key(key: str) -> str:
    """Key, below the root, of the ids of a pipeline's run."""
    return f"tracking/pipelines/{key}/{IDS_KEY}"


def child_ids_key(slug: str) -> str:
    """Key, below the run, of the ids of a child of the run."""
    return f"tasks/{slug}/{IDS_KEY}"


class IdsDocument(TypedDict):
    """`mlflow.json`: the ids by kind, for each server."""

    schema_version: NotRequired[int]
    servers: dict[str, dict[str, str]]


class TrackingIds:
    """The ids of one run on one server, by kind: "run", "url", and those of its model."""

    def __init__(self, store: Store, server: str, key: str = IDS_KEY) -> None:
        self._store, self._server, self._key = store, redact(server.rstrip("/")), key

    def read(self) -> dict[str, str]:
        """All stored ids; empty if there are none."""
        return self._mine(self._read()[0])

    def agree(self, kind: str, name: str, instead_of: str | None = None, **beside: str) -> str:
        """Stores an id and returns the one to use: `name`, or the stored one if there is one other than `instead_of`.

        A new run id replaces all ids of the old run. `beside` is stored together with the id.
        """
        while True:
            document, tag = self._read()
            mine = self._mine(document)
            standing = mine.get(kind)
            if standing is not None and (standing == name or standing != instead_of):
                return standing
            changed = ({} if kind == RUN else mine) | {kind: name, **beside}
            servers = document["servers"] | {self._server: changed}
            data = json_bytes(IdsDocument(schema_version=1, servers=servers))
            try:
                _ = self._store.compare_and_swap(self._key, data, tag) if tag else self._store.create(self._key, data)
            except PreconditionFailed:
                continue  # somebody else wrote, or the reply of our own write was lost: read again
            return name

    def _mine(self, document: IdsDocument) -> dict[str, str]:
        return document["servers"].get(self._server, {})

    def _read(self) -> tuple[IdsDocument, str | None]:
        try:
            data, tag = self._store.read_tagged(self._key)
        except FileNotFoundError:
            return {"servers": {}}, None
        return json.loads(data), tag
