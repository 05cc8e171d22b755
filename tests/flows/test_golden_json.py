"""Scripts rely on the keys of `--json`: `golden/json_shapes.json`, which this writes again where it is deleted."""

import json
import shutil
from pathlib import Path

import pytest

from ..golden.values import published_model

SHAPES = Path(__file__).parents[1] / "golden" / "json_shapes.json"
SMALL = [f"--set={each}" for each in ("recipe.total_steps=4", "recipe.optim.warmup_steps=1", "execution.num_workers=1")]
SMALL += ["--set=recipe.input.global_batch_size=8", "--set=recipe.input.num_lanes=1"]
COMMANDS = {
    "data diff": ("birds", "city"),
    "data ls": (),
    "data show": ("birds",),
    "data subset": ("birds", "8"),
    "data verify": ("city",),
    "evaluate protocols": (),
    "evaluate report": (),
    "model ls": (),
    "model show": ("MODEL",),
    "model variants": (),
    "model verify": ("MODEL",),
    "nights ls": (),
    "ops collect-garbage": (),
    "plan cluster": ("--corpus", "birds", "--recipe", "digits", "--gpus-per-node", "1", *SMALL),
    "pretrain run --plan": ("--corpus", "birds", "--recipe", "digits", *SMALL),
    "pretrain recipes": (),
    "runs ls": (),
}


def shape(value):
    """Keys and kinds, without values: of a list those of its first item, of a table by name those of its first entry."""
    if isinstance(value, dict):
        below = {key: shape(each) for key, each in value.items()}
        one, *others = below.values() or [None]
        table = (
            isinstance(one, dict)
            and others
            and all(isinstance(each, dict) and each.keys() == one.keys() for each in others)
        )
        return {"each": one} if table else below
    if isinstance(value, list):
        return [shape(below) for below in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.fixture(scope="module")
def root(two_corpora, tmp_path_factory):
    root = tmp_path_factory.mktemp("json") / "store"
    shutil.copytree(two_corpora, root)
    return str(root), published_model(str(root))


@pytest.mark.slow
def test_the_keys_of_json_are_the_golden_ones(vitline, root, monkeypatch):
    store, model = root
    found = {}
    for command, arguments in COMMANDS.items():
        given = [model if each == "MODEL" else each for each in arguments]
        rooted = [] if command in ("model variants", "pretrain recipes") else ["--root", store]
        code, out, err = vitline(*command.split(), *given, *rooted, "--json")
        assert code == 0, (command, err)
        found[command] = shape(json.loads(out))
    if not SHAPES.exists():
        SHAPES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        pytest.fail(f"{SHAPES.name} was written anew: read what has changed")
    assert found == json.loads(SHAPES.read_text())
