"""The scenarios that start a Ray of their own find their promises kept, and broken where a resumed training is wrong."""

from unittest.mock import patch

import pytest

from vitline.flows.chaos.bench import Bench, Outcome
from vitline.flows.chaos.faults import cluster_faults, node_faults
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from .scenarios import scenarios_in

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("chaos"))
    return Bench(Settings(root=root), open_store(root))


@pytest.mark.parametrize("scenario", [*scenarios_in(cluster_faults), *scenarios_in(node_faults)])
def test_promise_is_kept_on_ray(scenario, bench):
    result = scenario.run(bench)
    assert result.verdict == "kept", result


def test_a_run_that_was_not_restarted_or_differs_breaks_its_promise(tmp_path):
    bench = Bench(Settings(root=str(tmp_path)), open_store(tmp_path))
    with patch.object(cluster_faults, "on_cluster", lambda bench, name, fault: bench_of_whole(bench, name)):
        result = cluster_faults.killed_worker.run(bench)
        assert (result.verdict, "1 starts" in result.found) == ("broken", True)
        bench.__dict__["undisturbed"] = Outcome({1: 0.5}, 0.0, "")
        result = cluster_faults.killed_worker.run(bench)
        assert (result.verdict, "other losses" in result.found) == ("broken", True)


@pytest.mark.parametrize(("scenario", "found"), [("lost_node", "1 starts"), ("drained_node", "attempt 1 finished")])
def test_a_run_that_never_left_its_node_breaks_its_promise(scenario, found, tmp_path):
    bench = Bench(Settings(root=str(tmp_path)), open_store(tmp_path))
    with patch.object(node_faults, "with_harm", lambda bench, name, harm: bench_of_whole(bench, name)):
        result = vars(node_faults)[scenario].run(bench)
    assert (result.verdict, found in result.found) == ("broken", True)


def bench_of_whole(bench, name):
    training = bench.training(name)
    training.train()
    return training
