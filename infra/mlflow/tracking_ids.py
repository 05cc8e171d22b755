"""The MLflow ids of a run on each server, in the store. Imports no MLflow.

`<root>/runs/<run key>/mlflow.json`: {"servers": {tracking URI: {"run": id, "url": page, ...}}}. The sender that holds the lease writes
it. Where the record is lost, the run is found by its tags, and the record is written again.
"""

import json
from collections.abc import Mapping

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


class IdsChanged(RuntimeError):
    """Another sender has written the ids since they were read: this one was suspended, and its lease was taken over."""


class TrackingIds:
    """The ids of one run on one server, by kind: "run", "url", and those of its model."""

    def __init__(self, store: Store, server: str, key: str = IDS_KEY) -> None:
        self._store, self._server, self._key = store, redact(server.rstrip("/")), key
        self._servers: dict[str, dict[str, str]] = {}
        self._tag: str | None = None

    def read(self) -> dict[str, str]:
        """All stored ids; empty if there are none."""
        data, self._tag = self._store.read_tagged_or_none(self._key)
        self._servers = {} if data is None else json.loads(data)["servers"]
        return self._servers.get(self._server, {})

    def save(self, ids: Mapping[str, str]) -> None:
        """Adds ids to those that were read; a run id replaces all ids of the old run. Raises IdsChanged if somebody else has written
        since."""
        old = {} if RUN in ids else self._servers.get(self._server, {})
        servers = self._servers | {self._server: {**old, **ids}}
        data, store, key = json_bytes({"schema_version": 1, "servers": servers}), self._store, self._key
        try:
            self._tag = store.create_or_swap(key, data, self._tag)
        except PreconditionFailed as error:
            raise IdsChanged(f"{store.uri_of(key)} was changed by another sender; trying again.") from error
        self._servers = servers
