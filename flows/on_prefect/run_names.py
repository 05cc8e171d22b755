"""Names of flow runs: a name that a person typed is kept, a generated one is replaced by a descriptive one."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from vitline.flows.forms.training_draft import recipe_title
from vitline.flows.on_prefect.prefect_private import named_by_server

_OURS = re.compile(r".+-\d{4}-\d{6}")


def given_name(name: str | None) -> str | None:
    """The name of a flow run if a person chose it; None if Prefect or vitline generated it."""
    if not name or _OURS.fullmatch(name) or _suggested().fullmatch(name) or named_by_server(name):
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


@cache
def _suggested() -> re.Pattern[str]:
    """What the run dialogs of Prefect's pages suggest, by their own lists of words: the first page a Greek letter, a number, a place
    and a word, each but the letter left out at times (`alpha3-andromedae-flux`), the second page `Awesome-Olingo`."""
    lists = json.loads(Path(__file__).with_name("suggested_names.json").read_text("utf-8"))
    one_of = {name: f"(?:{'|'.join(map(re.escape, words.split()))})" for name, words in lists.items()}
    rest = rf"-{one_of['place']}?(?:-{one_of['word']})?"
    # A letter alone is rather the name of a parameter that somebody typed.
    first = rf"{one_of['letter']}(?:[1-9]\d{{0,2}}(?:{rest})?|{rest})"
    return re.compile(rf"{first}|{one_of['adjective']}-{one_of['animal']}")
