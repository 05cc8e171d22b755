"""Names of flow runs: a name that a person typed is kept, a generated one is replaced by a descriptive one."""

import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from vitline.flows.requests.training_draft import recipe_title

# The run dialog of Prefect's page suggests names such as `alpha3-andromedae-flux`: a Greek letter, one of some thousand
# places, and sometimes a word. A typed name such as `beta-test` cannot be distinguished from these.
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|"
    "omega"
)
_BY_PAGE = re.compile(rf"(?:{_GREEK})\d*(?:-[a-z]*)*")
_OURS = re.compile(r".+-\d{4}-\d{6}")


def given_name(name: str | None) -> str | None:
    """The name of a flow run if a person chose it; None if Prefect or vitline generated it."""
    if not name or _OURS.fullmatch(name) or _BY_PAGE.fullmatch(name) or _made_by_server(name):
        return None
    return name


def descriptive_name(flow: str, request: Mapping[str, Any], now: datetime) -> str:
    """`icons-birds-s0-1121-030000`: name, parent, recipe (also one of its own), corpus, model and preset of the request, seed, and UTC
    time."""
    if isinstance(own := (request.get("overrides") or {}).get("recipe"), str):
        request = {**request, "recipe": recipe_title(own)}
    parts = [
        str(request.get(field))
        for field in ("name", "parent", "recipe", "corpus", "model", "preset")
        if request.get(field)
    ]
    what = "-".join(dict.fromkeys(part.rsplit("/", 1)[-1] for part in parts))[:60] or flow
    seed = f"-s{request['seed']}" if request.get("seed") is not None else ""
    return f"{what}{seed}-{now:%m%d-%H%M%S}"


def _made_by_server(name: str) -> bool:
    words = name.split("-")
    return len(words) == 2 and _vocabulary().issuperset(words)


@lru_cache(maxsize=1)
def _vocabulary() -> frozenset[str]:
    """The words of the `adjective-animal` names that Prefect generates."""
    from coolname import data

    parts: dict[str, Any] = data.config
    return frozenset(word for part in parts.values() for word in part.get("words", []))
