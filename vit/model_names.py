"""Published models by the names that people give them; without torch, for commands and forms."""

import re

from infra.names import there_are
from infra.storage import open_store

_MODEL_KEY = r"models/[^/]+/[^/]+/config\.json"


def is_location(name: str) -> bool:
    """Whether a corpus or model is given as a path or URI rather than by its name."""
    return "://" in name or name.startswith(("/", "./", "../", "~"))


def find_published(root: str, name: str) -> str:
    """URI of the published model NAME, the newest of its versions, or NAME/VERSION. Raises ValueError that lists the models
    there are."""
    models = open_store(root)
    there = [tuple(key.split("/")[1:3]) for key in models.list("models/") if re.fullmatch(_MODEL_KEY, key)]
    found = [(model, version) for model, version in there if name in (model, f"{model}/{version}")]
    if not found:
        known = there_are(name, (f"{model}/{version}" for model, version in there))
        raise ValueError(f"{name!r} is no published model below {root}; {known}")

    def age(place: tuple[str, ...]) -> tuple[float, str]:
        # Models of before there was a time are the oldest.
        created = models.read_json(f"models/{'/'.join(place)}/config.json").get("created_at", 0.0)
        return created, place[1]

    newest = max(found, key=age) if len(found) > 1 else found[0]
    return models.uri_of(f"models/{'/'.join(newest)}")
