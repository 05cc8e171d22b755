"""Names of flow runs: the one that a person typed is kept, the ones that machines made up say what the run is about."""

import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

# What the run dialog of Prefect's page fills in until somebody types: `alpha3-andromedae-flux`, a Greek letter, one of some
# thousand places, and at times a word. A person's own `beta-test` cannot be told from these.
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|"
    "omega"
)
_BY_PAGE = re.compile(rf"(?:{_GREEK})\d*(?:-[a-z]*)*")
_OURS = re.compile(r".+-\d{4}-\d{6}")


def given_name(name: str | None) -> str | None:
    """The name of a flow run, where a person gave it; None for one that Prefect or vitline made up."""
    if not name or _OURS.fullmatch(name) or _BY_PAGE.fullmatch(name) or _made_by_server(name):
        return None
    return name


def telling_name(flow: str, request: Mapping[str, Any], now: datetime) -> str:
    """`emoji-noto-emoji-s0-1121-030000`: what is asked for, of what, with which seed, and when in UTC."""
    parts = [str(request.get(field)) for field in ("name", "recipe", "corpus", "model", "preset") if request.get(field)]
    what = "-".join(dict.fromkeys(part.rsplit("/", 1)[-1] for part in parts))[:60] or flow
    seed = f"-s{request['seed']}" if request.get("seed") is not None else ""
    return f"{what}{seed}-{now:%m%d-%H%M%S}"


def _made_by_server(name: str) -> bool:
    words = name.split("-")
    return len(words) == 2 and _vocabulary().issuperset(words)


@lru_cache(maxsize=1)
def _vocabulary() -> frozenset[str]:
    """The words of Prefect's own `adjective-animal` names."""
    from coolname import data

    parts: dict[str, Any] = data.config
    return frozenset(word for part in parts.values() for word in part.get("words", []))
