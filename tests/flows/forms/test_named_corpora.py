"""The tasks that a form names; `vtab` means those of its tasks that are prepared."""

import json
import shutil

import pytest

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest, PipelineRequest
from vitline.flows.forms.named_corpora import named_tasks
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.infra.storage import open_store


@pytest.fixture
def some_of_vtab(digits_root, tmp_path) -> str:
    """A root with two prepared tasks of VTAB: copies of digits under their names."""
    for name in ("vtab-svhn", "vtab-dtd", "pets"):
        copy = tmp_path / "store" / "corpora" / name
        shutil.copytree(f"{digits_root}/corpora/digits", copy)
        for manifest in copy.glob("*/manifest.json"):
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": name}))
    return str(tmp_path / "store")


def test_vtab_selects_its_prepared_tasks_in_every_form(some_of_vtab, digits_root, tiny):
    def named(tasks):
        return named_tasks(some_of_vtab, Corpora(open_store(some_of_vtab)), tasks)

    tasks = ("pets", "vtab", "vtab-dtd")
    plan = resolve_pipeline(some_of_vtab, PipelineRequest(corpus="pets", recipe="digits", tasks=tasks))
    assert [uri.split("/")[-2] for uri in plan.tasks] == ["pets", "vtab-dtd", "vtab-svhn"]
    (evaluation,) = resolve_evaluate(some_of_vtab, EvaluateRequest(model=tiny, tasks=tasks))
    assert [task.name for task in evaluation.tasks] == ["pets", "vtab-dtd", "vtab-svhn"]
    assert evaluation.note == plan.note == named(tasks).note
    assert plan.note.startswith(
        "vtab means 2 of its 19 tasks here; not prepared: vtab-caltech101, vtab-cifar100, vtab-flowers102"
    )
    assert plan.note.endswith("`vitline vtab prepare --task vtab` prepares them.")
    assert named(("pets",)).note is None
    with pytest.raises(ValueError, match=r"No task of vtab is prepared below .*vitline vtab prepare"):
        resolve_pipeline(digits_root, PipelineRequest(corpus="digits", recipe="digits", tasks=("vtab",)))
    with pytest.raises(ValueError, match=r"No task of robustness is prepared .*vtab prepare --task robustness"):
        named(("vtab", "robustness"))
