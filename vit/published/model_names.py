"""Finds published models by name. Imports no torch, so that commands and forms stay fast."""

import contextlib
import re

from vitline.infra.names import known_names_text
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.storage import open_store

_MODEL_KEY = r"models/[^/]+/[^/]+/config\.json"


def find_published(root: str, name: str) -> str:
    """URI of a published model: NAME (its newest version) or NAME/VERSION. Raises ValueError listing the known models."""
    store = open_store(root)
    published = [tuple(key.split("/")[1:3]) for key in store.list("models/") if re.fullmatch(_MODEL_KEY, key)]
    found = [(model, version) for model, version in published if name in (model, f"{model}/{version}")]
    if not found:
        known = known_names_text(name, (f"{model}/{version}" for model, version in published))
        raise ValueError(f"{name!r} is not a published model below {root}; {known}")

    def creation(model_version: tuple[str, ...]) -> tuple[float, str]:
        # One whose record cannot be read counts as the oldest: loading it by its version says what is wrong.
        key = f"models/{'/'.join(model_version)}/config.json"
        with contextlib.suppress(UnreadableRecord), reading(store.uri_of(key)):
            return float(store.read_json(key)["created_at"]), model_version[1]
        return -1.0, model_version[1]

    newest = max(found, key=creation) if len(found) > 1 else found[0]
    return store.uri_of(f"models/{'/'.join(newest)}")
