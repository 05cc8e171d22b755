"""Prefect or MLflow that is away, or whose database is locked, under a flow run; on servers of the chaos run's own."""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vitline.flows.chaos.bench import Bench, Training
from vitline.flows.chaos.own_servers import OwnServers
from vitline.flows.chaos.promises import NotTried, PromiseBroken, require, wait_until
from vitline.flows.chaos.scenario import scenario
from vitline.flows.records import attempt_records
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import Store
from vitline.vit.run_spec import RunSpec, read_starts

NEEDS = "2 GB of memory on this machine"
STEPS = 400
DUE_S, LATE_S = 6.0, 15.0
_STARTED_S, _TRAINED_S, _SENT_S = 600.0, 600.0, 600.0
# What a client or a server says of a server that is away, or of a locked database, is the fault itself.
AWAY = (
    "Connect(ion)?(Error|Refused)|connection attempts failed|Max retries exceeded|disconnected|RemoteProtocolError"
    "|did not receive a valid HTTP response"  # of a server that was killed while a websocket was opened
    # What watches for cancels in Prefect's worker gives up after a while; flows read their own state.
    r"|prefect-worker\.log: .*(Service exceeded error threshold|NoEventLoopError|CancelledError)"
)
LOCKED = "database is locked|503|ReadTimeout|WebSocketDisconnect"  # the last of a client that gave up waiting


@scenario("Prefect is killed before a flow run is due, and comes back after that", NEEDS, about_s=60)
def prefect_away_at_start(bench: Bench) -> str:
    """A flow run that is due while Prefect is away starts once Prefect is back, trains once, and ends as completed."""
    name, servers = "prefect-away-at-start", bench.servers
    flow_run = servers.start("pretrain/default", request(bench, name), in_s=DUE_S)
    with servers.away("prefect"):
        time.sleep(DUE_S + LATE_S)
    starts = len(read_starts(checked(bench, servers, flow_run, name, AWAY)))
    require(starts == 1, f"the training was started {starts} times")
    return f"due for {LATE_S:g} s without Prefect, trained once"


@scenario("Prefect is killed as a training is submitted, and comes back after its end", NEEDS, about_s=60)
def prefect_away(bench: Bench) -> str:
    """A training goes on while Prefect is away, and its flow run ends as completed once Prefect is back."""
    return through(bench, "prefect-away", lambda servers: servers.away("prefect"), AWAY)


@scenario("MLflow is killed as a training is submitted, and comes back after its end", NEEDS, about_s=60)
def mlflow_away(bench: Bench) -> str:
    """A training and its flow end while MLflow is away; afterwards MLflow has every point of its curves once."""
    return through(bench, "mlflow-away", lambda servers: servers.away("mlflow"), AWAY)


@scenario("the database of Prefect is locked from the submission of a training to its end", NEEDS, about_s=60)
def prefect_locked(bench: Bench) -> str:
    """A training goes on while nothing can be written to Prefect, and its flow run ends as completed once that works again."""
    return through(bench, "prefect-locked", lambda servers: servers.locked("prefect"), LOCKED)


@scenario("the database of MLflow is locked from the submission of a training to its end", NEEDS, about_s=60)
def mlflow_locked(bench: Bench) -> str:
    """A training and its flow end while nothing can be written to MLflow; afterwards MLflow has every point of its curves
    once."""
    return through(bench, "mlflow-locked", lambda servers: servers.locked("mlflow"), LOCKED)


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


def through(
    bench: Bench, name: str, fault: Callable[[OwnServers], AbstractContextManager[None]], explained: str
) -> str:
    """A flow run whose training suffers the fault from its submission, seconds before its first step, to its end."""
    servers = bench.servers
    flow_run = servers.start("pretrain/default", request(bench, name))
    try:
        wait_until(lambda: is_submitted(bench, name), "the training is submitted", _STARTED_S)
    except PromiseBroken as late:  # as on a busy machine: there was no fault yet
        raise NotTried(str(late)) from late
    run = run_of(bench, name)
    assert run is not None
    with fault(servers):
        if has_ended(run):
            raise NotTried("the training was over before the fault")
        wait_until(lambda: has_ended(run), f"the training {run.uri} ends under the fault", _TRAINED_S)
    checked(bench, servers, flow_run, name, explained)
    return f"{STEPS} steps under the fault, complete everywhere afterwards"


def checked(bench: Bench, servers: OwnServers, flow_run: str, name: str, explained: str) -> Store:
    """The run of a flow run once that has ended: complete in Prefect, in MLflow and in the store, and as without the fault."""
    ended = servers.ended(flow_run)
    require(ended.startswith("Completed"), f"the flow run ended as {ended}")
    run = run_of(bench, name)
    require(run is not None, f"flow run {flow_run} has made no run")
    assert run is not None
    key = run.uri.rpartition("/")[2]
    points = sorted((each.step, each.value) for each in read_journal(run) if each.key == "train/loss")
    what = f"MLflow has {len(points)} points of {key}"
    wait_until(lambda: servers.has_points(key, "train/loss", len(points)), what, _SENT_S)
    sent = servers.curve(key, "train/loss")
    require(sent == points, f"MLflow has {len(sent)} points of train/loss, the journal {len(points)}")
    spec = RunSpec.model_validate(run.read_json("config.json"))
    undisturbed = Training(bench.place.child("undisturbed").uri, spec.config)
    undisturbed.train()
    require(
        Training.of(run, key).outcome == undisturbed.outcome, f"{key} differs from a training that nothing disturbed"
    )
    found = servers.new_tracebacks(explained)
    require(not found, f"the servers log: {'; '.join(found)}")
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
