"""Every worker and task of a job compares its versions with those of the process that submitted the job."""

import json
import pickle
import platform
from types import SimpleNamespace

import pyarrow as pa
import pytest

from vitline.data_prep.prepare.job import _run_task
from vitline.vit.evaluation.run_trial import ensure_trial
from vitline.vit.ray_jobs.probe_tasks import score_in_task
from vitline.vit.ray_jobs.task_driver import PartWorker, watched_probe


def train(root, monkeypatch):
    import ray.train

    from vitline.vit.ray_jobs.train_driver import train_worker

    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
    train_worker({"run": root, "attempt": 1})


WORK = {
    "preparation": lambda: _run_task({"task": b"of another version"}, work=None)["error"],
    "features": lambda: pickle.loads(next(PartWorker()(pa.table({"chunk": [b"?"]})))["result"][0].as_py())[1],
    "trial": lambda: ensure_trial("", None),
    "probe trial": lambda: watched_probe("", None, None),
    "checkpoint probe": lambda: score_in_task("", "", None),
}


@pytest.mark.parametrize("work", [*WORK, "training"])
def test_another_vitline_on_a_node_is_named_with_its_host(work, root, monkeypatch):
    monkeypatch.setenv("VITLINE_SUBMITTED_FROM", json.dumps({"vitline": "0.0.1"}))
    try:
        said = train(root, monkeypatch) if work == "training" else WORK[work]()
    except RuntimeError as error:
        said = str(error)
    assert f"on {platform.node()} runs vitline " in said
    assert "(submitted from vitline 0.0.1). Install the same versions there" in said
