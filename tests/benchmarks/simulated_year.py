"""A year in minutes: what a store and a Prefect server hold, and how long their lists take, with and without garbage collection.

python tests/benchmarks/simulated_year.py store [--runs 2000]
python tests/benchmarks/simulated_year.py flow-runs [--flow-runs 10000] [--database prefect.db] [--by-api 500]
python tests/benchmarks/simulated_year.py lists [--runs 2000] [--models 50]
python tests/benchmarks/simulated_year.py mlflow [--runs 2000] [--models 50]

`store` writes runs over 52 weeks into a temporary folder, one in ten without an end, and moves the clock, and collects after
each week as the deployment does. `flow-runs` needs PREFECT_API_URL of a server to spoil, with vitline's
deployments (`vitline flows deploy`) and PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED=false; it collects as from 100 days later. With
--database, those beyond --by-api are copies of their rows in that SQLite file, one every 15 minutes of the past. `lists` writes
runs, pipelines and models below VITLINE_ROOT, which should be an empty S3 prefix or folder, and times what lists them. `mlflow` fills
a server of its own, by its Python store, and times what its pages and vitline ask of it.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from vitline.flows.catalog.lists import list_models, list_runs_and_pipelines
from vitline.flows.catalog.records import PipelineRecord, write_pipeline
from vitline.flows.forms.forms import CollectGarbageRequest, ReconcileRequest
from vitline.flows.on_prefect.deployments import COLLECT
from vitline.flows.on_prefect.old_flow_runs import NOTHING_TO_DO, delete_old_flow_runs
from vitline.flows.ops.collect_garbage import DAY_S, collect_garbage
from vitline.flows.ops.flow_runs import NoFlowRuns
from vitline.flows.ops.reconcile import reconcile
from vitline.flows.reports.compare_runs import compare_newest
from vitline.flows.runs.services import ConsoleObserver, Services
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.settings import DEFAULT_PROJECT, Settings
from vitline.infra.storage import open_store

WEEKS, SEGMENTS, CHECKPOINTS = 52, 20, 4
WEIGHTS = bytes(20_000)
real_time = time.time


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def best(work: Callable[[], Any], times: int = 5) -> float:
    """The shortest of some times: the others say more of the neighbours on this machine."""
    return min(timed(work)[0] for _ in range(times))


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def add_run(root: Path, number: int, at: float) -> None:
    """A training that ended then; every tenth was preempted and never resumed."""
    key = f"train-{number:012x}"
    run, state = root / "runs" / key, "finished" if number % 10 else "preempted"
    lease = {
        "run_key": key,
        "attempt": 1,
        "job_id": f"{key}-a1",
        "owner": "ann@host:1",
        "nonce": key,
        "counter": 9,
        "heartbeat": at,
    }
    write(run / "lease.json", {"schema_version": 1, **lease})
    write(run / "config.json", {"run_key": key, "stage": "pretrain"})
    write(run / "state.json", {"schema_version": 1, "state": state, "attempt": 1, "updated_at": at, "step": 100})
    for segment in range(SEGMENTS):
        line = {"seq": segment, "key": "train/loss", "value": 1.0, "step": segment, "timestamp_ms": int(1000 * at)}
        write(run / f"journal/a1/segment-{segment:06d}.jsonl", line)
    for checkpoint in range(CHECKPOINTS):
        folder = run / f"checkpoints/step-{25 * (checkpoint + 1):09d}-a1"
        write(folder / "manifest.json", {})
        write(folder / "rank-00000-of-00001-0f.safetensors", WEIGHTS)


def store_year(num_runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, number, start = Path(folder) / "store", 0, real_time() - 7 * WEEKS * DAY_S
        settings = Settings(root=str(root), mlflow_tracking_uri=None)
        services = Services(settings, None, ConsoleObserver(), SenderChild(settings, Path(folder)))  # type: ignore[arg-type]
        print(
            "| week | runs | objects | of journals | MB | checkpoints | list, s | collection, s |\n|---|---|---|---|---|---|---|---|"
        )
        for week in range(1, WEEKS + 1):
            for _ in range(num_runs * week // WEEKS - number):
                number += 1
                add_run(root, number, start + 7 * week * DAY_S)
            time.time = lambda now=start + 7 * week * DAY_S: now
            collect_s, _ = timed(lambda: collect_garbage(CollectGarbageRequest.model_validate(COLLECT), services))
            if week % 13 == 0:
                files = [path for path in root.rglob("*") if path.is_file()]
                sizes, list_s = (
                    sum(path.stat().st_size for path in files) / 1e6,
                    timed(lambda: list_runs_and_pipelines(str(root)))[0],
                )
                manifests = sum(path.name == "manifest.json" for path in files)
                journals = sum("journal" in path.parts for path in files)
                counts = f"{number:,} | {len(files):,} | {journals:,} | {sizes:.1f} | {manifests:,}"
                print(f"| {week} | {counts} | {list_s:.2f} | {collect_s:.2f} |", flush=True)
        time.time = real_time


def copy_flow_runs(database: Path, number: int) -> None:
    """Copies flow runs and their states, row by row, until there are `number`; the copies end one every 15 minutes of the past."""
    with closing(sqlite3.connect(database, timeout=120)) as file, file:
        file.row_factory = sqlite3.Row
        rows = [dict(row) for row in file.execute("select * from flow_run")]
        states = {row["flow_run_id"]: dict(row) for row in file.execute("select * from flow_run_state")}
        for age in range(len(rows), number):
            row, new, state_id = {**rows[age % len(rows)], "idempotency_key": None}, str(uuid4()), str(uuid4())
            ended = str((datetime.now(UTC) - timedelta(minutes=15 * age)).replace(tzinfo=None))
            times = dict.fromkeys(
                ("created", "expected_start_time", "start_time", "end_time", "state_timestamp"), ended
            )
            state = states[row["id"]]
            details = state["state_details"].replace(row["id"], new)
            state = {**state, "id": state_id, "flow_run_id": new, "timestamp": ended, "state_details": details}
            for table, values in (
                ("flow_run_state", state),
                ("flow_run", {**row, **times, "id": new, "state_id": state_id}),
            ):
                marks = ", ".join("?" * len(values))
                file.execute(f"insert into {table} ({', '.join(values)}) values ({marks})", list(values.values()))


def flow_run_year(num_flow_runs: int, database: Path | None, by_api: int) -> None:
    from vitline.flows.on_prefect.prefect_observer import client
    from vitline.flows.on_prefect.prefect_runs import PrefectFlowRuns

    def size() -> str:
        return (
            f", database {sum(path.stat().st_size for path in database.parent.glob(f'{database.name}*')) / 1e6:.0f} MB"
            if database
            else ""
        )

    with client() as api:
        ids = {
            name: api.read_deployment_by_name(name).id
            for name in ("reconcile/default", "pretrain-then-transfer/nightly")
        }

        def create(number: int) -> None:
            name = "pretrain-then-transfer/nightly" if number % 25 == 0 else "reconcile/default"
            message = "val/top1 41.2 %" if name.endswith("nightly") else NOTHING_TO_DO["reconcile"]
            state = {"type": "COMPLETED", "name": "Completed", "message": message}
            api.request(
                "POST", "/deployments/{id}/create_flow_run", path_params={"id": ids[name]}, json={"state": state}
            )

        def lists() -> str:
            ours = {"deployment_id": {"any_": [str(ids["reconcile/default"])]}}
            newest = {"sort": "START_TIME_DESC", "limit": 200, "flow_runs": ours}
            count_s, count = timed(lambda: api.request("POST", "/flow_runs/count", json={}).json())
            newest_s = best(lambda: api.request("POST", "/flow_runs/filter", json=newest))
            now = datetime.now(UTC)
            week = {
                "history_start": str(now - timedelta(days=7)),
                "history_end": str(now),
                "history_interval_seconds": 21_600,
            }
            asked = {
                "a page of all": ("/flow_runs/paginate", {"sort": "EXPECTED_START_TIME_DESC", "limit": 25, "page": 1}),
                "its 100th": ("/flow_runs/paginate", {"sort": "EXPECTED_START_TIME_DESC", "limit": 25, "page": 100}),
                "of the nights": (
                    "/flow_runs/paginate",
                    {
                        "limit": 25,
                        "page": 1,
                        "flow_runs": {"deployment_id": {"any_": [str(ids["pretrain-then-transfer/nightly"])]}},
                    },
                ),
                "history of a week": ("/flow_runs/history", week),
                "deployments": ("/deployments/paginate", {"limit": 50}),
            }
            times = [f"count {count_s:.2f} s, newest 200 {newest_s:.2f} s"]
            times += [
                f"{what} {best(lambda path=path, body=body: api.request('POST', path, json=body)):.2f} s"  # type: ignore[misc]
                for what, (path, body) in asked.items()
            ]
            unfinished_s = best(lambda: PrefectFlowRuns(DEFAULT_PROJECT).unfinished())
            return f"{count:,} flow runs: {', '.join(times)}, what reconcile reads {unfinished_s:.2f} s"

        with ThreadPoolExecutor(1) as pool:
            first = min(num_flow_runs, by_api) if database else num_flow_runs
            there = api.request("POST", "/flow_runs/count", json={}).json()
            create_s, _ = timed(lambda: list(pool.map(create, range(there, first))))
            if database:
                copy_flow_runs(database, num_flow_runs)
        print(f"created in {create_s:.0f} s: {lists()}{size()}", flush=True)
        later = real_time() + 100 * DAY_S
        while True:
            seconds, found = timed(
                lambda: list(delete_old_flow_runs(DEFAULT_PROJECT, later - 90 * DAY_S, later - 2 * DAY_S, False))
            )
            print(
                f"collection of {seconds:.1f} s: {'; '.join(f'{f.subject} {f.action}' for f in found) or 'nothing'}; {lists()}{size()}",
                flush=True,
            )
            if not found:
                return


def lists(num_runs: int, num_models: int) -> None:
    """Times the lists of a store with finished runs, a pipeline for every tenth, and models."""
    settings = Settings(ray_address=None, mlflow_tracking_uri=None)  # neither jobs nor MLflow, for reconcile
    root, now = open_store(settings.root), real_time()

    def add(number: int) -> None:
        key, at = f"train-{number:012x}", now - 4 * 3600 * number
        root.write_json(f"runs/{key}/config.json", {"run_key": key, "stage": "pretrain"})
        state = {"schema_version": 1, "state": "finished", "attempt": 1, "updated_at": at, "step": 100}
        root.write_json(f"runs/{key}/state.json", state)
        lease = {
            "schema_version": 1,
            "run_key": key,
            "attempt": 1,
            "job_id": f"{key}-a1",
            "owner": "a@h:1",
            "nonce": key,
        }
        root.write_json(f"runs/{key}/lease.json", {**lease, "counter": 9, "heartbeat": at})
        root.write_json(f"runs/{key}/attempts/a1.json", {"schema_version": 1, "started_at": at, "origin": {}})
        if number % 10 == 0:
            record = {
                "key": f"night-{number:012x}",
                "name": "night",
                "state": "finished",
                "started_at": at,
                "updated_at": at,
            }
            write_pipeline(root, PipelineRecord(request={"seed": number}, metrics={"val/top1": 0.4}, **record))
        if number < num_models:
            model = {
                "digest": key,
                "num_classes": 10,
                "model": {"image_size_px": 32},
                "provenance": {},
                "created_at": at,
            }
            root.write_json(f"models/birds-{number % 10}/{number:012x}/config.json", model)

    with ThreadPoolExecutor(16) as pool:
        write_s, _ = timed(lambda: list(pool.map(add, range(num_runs))))
    print(f"{root.uri.partition('//')[0]} written in {write_s:.0f} s", flush=True)
    services = Services(settings, None, ConsoleObserver(), SenderChild(settings, Path(tempfile.gettempdir())))  # type: ignore[arg-type]
    asked: dict[str, Callable[[], Any]] = {
        "list_runs_and_pipelines (`vitline runs ls`)": lambda: list_runs_and_pipelines(settings.root),
        "list_models (`vitline model ls`)": lambda: list_models(settings.root),
        "compare_newest of 10": lambda: compare_newest(settings.root, [], 10),
        "reconcile": lambda: reconcile(ReconcileRequest(), services, NoFlowRuns()),
    }
    for what, work in asked.items():
        started = time.process_time()
        num_found = len(work())
        cpu_s = time.process_time() - started
        print(f"{what}: {num_found} in {best(work, 3):.2f} s, {cpu_s:.2f} s of CPU", flush=True)


def mlflow_year(num_runs: int, num_models: int) -> None:
    """Times a server with runs of 30 params and 40 metrics, and models of one version each."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    from vitline.infra.local.processes import free_ports
    from vitline.infra.mlflow.tracking import RUN_KEY, Tracking

    with tempfile.TemporaryDirectory() as folder:
        place, port, now = f"sqlite:///{folder}/mlflow.db", free_ports(1)[0], int(1000 * real_time())
        direct = MlflowClient(tracking_uri=place, registry_uri=place)
        experiment = direct.create_experiment("vitline/pretrain")
        started = time.perf_counter()
        for number in range(num_runs):
            at = now - 4 * 3_600_000 * number
            run = direct.create_run(experiment, at, {RUN_KEY: f"train-{number:012x}"}, f"train-{number}").info.run_id
            metrics = [Metric(f"vtab/task{n}/top1", 0.5, at, 100) for n in range(40)]
            params = [Param(f"recipe.field{n}", str(number)) for n in range(30)]
            direct.log_batch(run, metrics, params, [RunTag("vitline.state", "finished")])
            direct.set_terminated(run, "FINISHED", at + 1000)
            if number < num_models:
                direct.create_registered_model(f"birds-{number}")
                direct.create_model_version(f"birds-{number}", "file:///nowhere", run)
        print(f"{num_runs} runs and {num_models} models written in {time.perf_counter() - started:.0f} s", flush=True)
        command = ["-m", "mlflow", "server", "--backend-store-uri", place, "--port", str(port), "--workers", "1"]
        with open(Path(folder, "log"), "w") as log:
            server = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True)
        try:
            tracking, client = Tracking(f"http://127.0.0.1:{port}"), MlflowClient(f"http://127.0.0.1:{port}")
            for _ in range(120):
                try:
                    tracking.ping()
                    break
                except Exception:
                    time.sleep(1)
            newest = [run.info.run_id for run in client.search_runs([experiment], max_results=10)]
            asked: dict[str, Callable[[], Any]] = {
                "the newest 100 runs, a page": lambda: client.search_runs([experiment], max_results=100),
                "the best 100 by a metric": lambda: client.search_runs(
                    [experiment], max_results=100, order_by=["metrics.`vtab/task7/top1` DESC"]
                ),
                "all runs": lambda: client.search_runs([experiment], max_results=50_000),
                "a run by its key": lambda: tracking._search_runs(experiment, "train-000000000400", "s3://x"),
                "a comparison of 10 runs": lambda: [client.get_run(run) for run in newest],
                "registered models": lambda: client.search_registered_models(max_results=100),
                "model versions": lambda: client.search_model_versions(max_results=100),
            }
            for what, work in asked.items():
                print(f"{what}: {best(work):.2f} s", flush=True)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("store", "flow-runs", "lists", "mlflow"))
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--flow-runs", type=int, default=10_000)
    parser.add_argument("--by-api", type=int, default=500)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--database", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "store":
        store_year(arguments.runs)
    elif arguments.what == "lists":
        lists(arguments.runs, arguments.models)
    elif arguments.what == "mlflow":
        mlflow_year(arguments.runs, arguments.models)
    else:
        flow_run_year(arguments.flow_runs, arguments.database, arguments.by_api)


if __name__ == "__main__":
    main()
