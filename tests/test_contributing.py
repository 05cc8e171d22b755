"""The examples of CONTRIBUTING.md: their diffs apply to the code, and what they add works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def changes() -> list[tuple[str, str, str]]:
    """File, old lines and new lines of every hunk of every block."""
    found = []
    for block in re.findall(r"^```diff\n(.*?)^```", GUIDE, re.M | re.S):
        for name, hunks in re.findall(r"^--- [^\n]*\n\+\+\+ b/([^\n]*)\n(.*?)(?=^--- |\Z)", block, re.M | re.S):
            for hunk in hunks.split("@@\n")[1:]:
                lines = hunk.splitlines(keepends=True)
                old = "".join(line[1:] for line in lines if line[0] in " -")
                found.append((name, old, "".join(line[1:] for line in lines if line[0] in " +")))
    return found


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A copy of the code with all examples applied."""
    copy = tmp_path_factory.mktemp("contributing")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", "screenshots"))
    shutil.copytree(ROOT / "vitline", copy / "vitline", symlinks=True)
    for name, old, new in changes():
        path = copy / name
        text = path.read_text() if path.exists() else ""
        times = text.count(old) if old else 1
        assert times == 1, f"CONTRIBUTING.md changes lines that {name} has {times} times instead of once:\n{old}"
        assert old or not text, f"CONTRIBUTING.md says that {name} is new"
        path.write_text(text.replace(old, new) if old else new)
    return copy


def python(changed: Path, code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(changed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=changed, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_example_source_prepares_a_corpus(changed):
    pictures = changed / "pictures"
    pictures.mkdir()
    levels = np.random.default_rng(0)
    for name in [f"{bird}_{i}.png" for bird in ("crow", "jay") for i in range(6)] + ["nameless.png"]:
        Image.fromarray(levels.integers(0, 256, (8, 8, 3), np.uint8)).save(pictures / name)
    code = """
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_class_names
from vitline.flows.runs.prepare_corpus import source_request
from vitline.infra.storage import open_store
request = source_request("store", "pictures", "birds", kind="named_files", val_fraction=0.0, test_fraction=0.0)
(manifest,) = prepare([request], "store")
print(manifest.counts.num_accepted, manifest.counts.refused)
print(load_class_names(open_store(f"store/corpora/birds/{manifest.version}")))
"""
    assert python(changed, code) == "12 {'no_label': 1}\n['crow', 'jay']\n"


def test_example_recipe_and_protocol_are_registered_and_offered_in_forms(changed):
    code = """
from typing import get_args
from vitline.flows.forms.forms import EvaluateRequest, FinetuningName, PipelineRequest, ProtocolName, RecipeName
from vitline.vit.recipes import RECIPES, recipe_named
from vitline.vit.evaluation.protocols import known_protocols, protocol_named
print(recipe_named("birds").make()[0].total_steps, protocol_named("vit-paper-short").total_steps)
assert set(get_args(RecipeName)) == set(RECIPES) and get_args(ProtocolName) == tuple(known_protocols())
PipelineRequest(recipe="birds", protocol="vit-paper-short")
assert "vit-paper-short" in get_args(FinetuningName)
"""
    assert python(changed, code) == "3000 (500,)\n"


@pytest.mark.slow
def test_example_flow_has_a_deployment_with_its_form(changed):
    code = """
from vitline.flows.on_prefect import flows
from vitline.flows.on_prefect.deployments import deployment_named
from vitline.flows.on_prefect.deploy.form_schema import form_schema
from vitline.infra.settings import Settings
deployment = deployment_named("count-images/default")
assert getattr(flows, deployment.function).name == deployment.flow
print(deployment.form(), "CountRequest" in form_schema(deployment, Settings())["definitions"])
"""
    assert python(changed, code) == "{'corpus': 'digits'} True\n"
