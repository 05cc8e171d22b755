"""Every worker and task of a job compares its versions with those of the process that submitted the job."""

import json
import pickle
import platform
from types import SimpleNamespace

import pytest

from vitline.infra.runs.ray_work import _results


def train(root, monkeypatch):
    import ray.train

    from vitline.vit.ray_jobs.train_driver import train_worker

    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
    train_worker({"run": root, "attempt": 1})


def task(root, monkeypatch):
    """Neither the work nor what it is given can be unpickled."""
    ((_, error),) = _results(b"of another version", b"of another version", "task", None)
    raise error


@pytest.mark.parametrize("work", [task, train])
def test_another_vitline_on_a_node_is_named_with_its_host(work, root, monkeypatch):
    monkeypatch.setenv("VITLINE_SUBMITTED_FROM", json.dumps({"vitline": "0.0.1"}))
    with pytest.raises(RuntimeError) as refused:
        work(root, monkeypatch)
    assert f"on {platform.node()} runs vitline " in str(refused.value)
    assert "(submitted from vitline 0.0.1). Install the same versions there" in str(refused.value)


def needs_what_nobody_has(_):
    import no_such_package  # noqa: F401


def test_a_package_that_a_node_lacks_is_named_with_its_host():
    ((_, error),) = _results(pickle.dumps(needs_what_nobody_has), pickle.dumps(None), "task", None)
    assert f"on {platform.node()} has no no_such_package. Install there" in str(error)
