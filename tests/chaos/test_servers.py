"""Prefect or MLflow that is away, or whose database is locked, under a flow run; on servers of this module's own."""

import re
import time
from typing import Any

import pytest

from vitline.flows.catalog.records import attempt_records
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import Store
from vitline.vit.run.run_spec import RunSpec, read_starts

from ..eventually import eventually
from ..servers.own_servers import AWAY, OwnServers, own_servers
from .bench import Bench, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 400
DUE_S, LATE_S = 6.0, 15.0
_STARTED_S, _TRAINED_S, _SENT_S = 600.0, 600.0, 600.0
LOCKED = "database is locked|503|ReadTimeout|WebSocketDisconnect"  # the last of a client that gave up waiting


@pytest.fixture(scope="module")
def servers(bench):
    """Servers that work on the place of the bench."""
    with own_servers(bench.place.uri) as servers:
        yield servers


@pytest.mark.long
@pytest.mark.servers
def test_prefect_away_at_start(bench, servers):
    """A flow run that is due while Prefect is away starts once Prefect is back, trains once, and ends as completed."""
    name = "prefect-away-at-start"
    flow_run = servers.start("pretrain/default", request(bench, name), in_s=DUE_S)
    with servers.away("prefect"):
        time.sleep(DUE_S + LATE_S)
    starts = len(read_starts(checked(bench, servers, flow_run, name, AWAY)))
    assert starts == 1, f"the training was started {starts} times"


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.parametrize(
    ("service", "fault", "explained"),
    [
        ("prefect", OwnServers.away, AWAY),
        ("prefect", OwnServers.locked, LOCKED),
        ("mlflow", OwnServers.locked, LOCKED),
    ],
)
def test_a_training_goes_on(bench, servers, service, fault, explained):
    """While Prefect is away, or its or MLflow's database is locked, from the submission of a training to its end. Afterwards the
    flow run ends as completed, and MLflow has every point of its curves once."""
    name = f"{service}-{fault.__name__}"
    flow_run = servers.start("pretrain/default", request(bench, name))
    eventually(lambda: is_submitted(bench, name), _STARTED_S, "the training is submitted")
    run = run_of(bench, name)
    with fault(servers, service):
        assert not has_ended(run), "the training was over before the fault"
        eventually(lambda: has_ended(run), _TRAINED_S, f"the training {run.uri} ends under the fault")
    checked(bench, servers, flow_run, name, explained)


def request(bench: Bench, name: str) -> dict[str, Any]:
    """The form of a training of a few seconds."""
    return {
        "corpus": bench.corpus.uri,
        "recipe": "digits",
        "name": f"chaos-{name}",
        "num_workers": 1,
        "overrides": {
            "recipe.total_steps": STEPS,
            "recipe.optim.warmup_steps": 1,
            "recipe.input.global_batch_size": 16,
            "recipe.input.num_lanes": 4,
            "execution.save_every_steps": 100,
            "execution.log_every_steps": 1,
        },
    }


def checked(bench: Bench, servers: OwnServers, flow_run: str, name: str, explained: str) -> Store:
    """The run of a flow run once that has ended: complete in Prefect, in MLflow and in the store, and as without the fault."""
    ended = servers.ended(flow_run)
    assert ended.startswith("Completed"), f"the flow run ended as {ended}"
    run = run_of(bench, name)
    assert run is not None, f"flow run {flow_run} has made no run"
    key = run.uri.rpartition("/")[2]
    points = sorted((each.step, each.value) for each in read_journal(run) if each.key == "train/loss")
    what = f"MLflow has {len(points)} points of {key}"
    eventually(lambda: servers.has_points(key, "train/loss", len(points)), _SENT_S, what)
    sent = servers.curve(key, "train/loss")
    assert sent == points, f"MLflow has {len(sent)} points of train/loss, the journal {len(points)}"
    spec = RunSpec.model_validate(run.read_json("config.json"))
    undisturbed = Training(bench.place.child("undisturbed").uri, spec.config)
    undisturbed.train()
    assert Training.of(run, key).outcome == undisturbed.outcome, f"{key} differs from a training that nothing disturbed"
    found = servers.new_tracebacks(explained)
    assert not found, f"the servers log: {'; '.join(found)}"
    return run


def run_of(bench: Bench, name: str) -> Store | None:
    """The run of a training, once its flow has begun it."""
    keys = {key.split("/")[1] for key in bench.place.list(f"runs/chaos-{name}-")}
    found = [key for key in keys if re.fullmatch(f"chaos-{name}-[0-9a-f]{{12}}", key)]  # not those of longer names
    return bench.place.child(f"runs/{found[0]}") if found else None


def is_submitted(bench: Bench, name: str) -> bool:
    run = run_of(bench, name)
    return run is not None and bool(attempt_records(run))


def has_ended(run: Store) -> bool:
    return (read_state(run) or NO_STATE)["state"] != "running"
