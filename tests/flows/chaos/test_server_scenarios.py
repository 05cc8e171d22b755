"""Promises under a Prefect or MLflow that is away or locked: kept on real servers, and broken where an end is not as promised."""

from unittest.mock import patch

import httpx
import pytest

from vitline.flows.chaos import own_servers, small_disk
from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.faults import process_faults, server_faults
from vitline.flows.chaos.promises import NotTried, PromiseBroken
from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from .scenarios import scenarios_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def bench_at(folder):
    return Bench(Settings(root=str(folder)), open_store(folder))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = bench_at(tmp_path_factory.mktemp("chaos"))
    yield bench
    bench.close()


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.parametrize("scenario", scenarios_in(server_faults))
def test_promise_is_kept_on_real_servers(scenario, bench):
    result = scenario.run(bench)
    assert result.verdict == "kept", result


def test_a_server_whose_database_is_busy_is_asked_again():
    answers = [httpx.Response(status, request=httpx.Request("GET", "http://server/")) for status in (503, 503, 200)]
    assert own_servers.answer_of(lambda: answers.pop(0)).status_code == 200
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        own_servers.answer_of(lambda: httpx.Response(404, request=httpx.Request("GET", "http://server/")))


class Servers:
    """What servers say of a run, with one thing wrong."""

    def __init__(self, run, wrong):
        self.wrong = wrong
        self.points = sorted((each.step, each.value) for each in read_journal(run) if each.key == "train/loss")

    def ended(self, flow_run):
        return "Crashed: it was killed" if self.wrong == "flow" else "Completed: a model"

    def curve(self, key, metric):
        return [*self.points, *self.points[:1]] if self.wrong == "curve" else self.points

    def has_points(self, key, metric, number):
        return len(self.points) >= number

    def new_tracebacks(self, explained):
        return ["mlflow.log: 1 x KeyError: 'step'"] if self.wrong == "log" else []


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A bench with the finished run of a scenario."""
    bench = bench_at(tmp_path_factory.mktemp("broken"))
    bench.training("mlflow-away").train()
    bench.place.write("runs/chaos-mlflow-away-at-start-0123456789ab/config.json", b"{}")
    return bench


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("", None),
        ("flow", "ended as Crashed"),
        ("curve", "MLflow has 21 points of train/loss, the journal 20"),
        ("log", "KeyError: 'step'"),
        ("weights", "differs from a training that nothing disturbed"),
    ],
)
def test_every_end_that_is_not_as_promised_is_found(trained, wrong, found, monkeypatch):
    run = server_faults.run_of(trained, "mlflow-away")
    servers, training = Servers(run, wrong), server_faults.Training
    if wrong == "weights":  # of another seed
        monkeypatch.setattr(
            training,
            "__init__",
            lambda self, root, config, real=training.__init__: real(self, root, other_seed(config)),
        )
    if found is None:
        assert server_faults.checked(trained, servers, "f", "mlflow-away", "x").uri == run.uri
    else:
        with pytest.raises(PromiseBroken, match=found):
            server_faults.checked(trained, servers, "f", "mlflow-away", "x")


def other_seed(config):
    return replace(config, **{"recipe.seed": 7})


def test_what_cannot_be_started_or_mounted_is_not_tried(tmp_path):
    def refuses(*_, **__):
        raise RuntimeError("mlflow was not ready after 180 s")

    bench = bench_at(tmp_path)
    _ = bench.corpus
    with patch.object(own_servers, "start_stack", refuses):
        result = server_faults.mlflow_away.run(bench)
    assert (result.verdict, "mlflow was not ready" in result.found) == ("not tried", True)
    with patch.object(small_disk, "_MOUNT", "echo mount: permission denied >&2; exit 32"):
        result = process_faults.full_file_system.run(bench)
    assert (result.verdict, "permission denied" in result.found) == ("not tried", True)
    with patch.object(small_disk.shutil, "which", lambda name: None), pytest.raises(NotTried, match="util-linux"):
        small_disk.small_disk().__enter__()
