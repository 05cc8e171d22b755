"""A year in minutes: what a store and a Prefect server hold, and how long their lists take, with and without garbage collection.

python tests/benchmarks/simulated_year.py store [--runs 2000]
python tests/benchmarks/simulated_year.py flow-runs [--flow-runs 10000] [--database prefect.db]

`store` writes runs over 52 weeks into a temporary folder, one in ten without an end, and moves the clock, and collects after
each week as the deployment does. `flow-runs` needs PREFECT_API_URL of a server to spoil, with vitline's
deployments (`vitline flows deploy`) and PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED=false; it collects as from 100 days later.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flows.catalog import list_runs
from flows.on_prefect.deployments import COLLECT
from flows.on_prefect.old_flow_runs import NOTHING_TO_DO, PrefectOldFlowRuns
from flows.ops.collect_garbage import DAY_S, collect_garbage
from flows.requests.forms import CollectGarbageRequest
from flows.stages.engines import Engines, Terminal
from flows.to_mlflow.shipper import Shipper
from infra.settings import Settings

WEEKS, SEGMENTS, CHECKPOINTS = 52, 20, 4
WEIGHTS = bytes(20_000)
real_time = time.time


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def add_run(root: Path, number: int, at: float) -> None:
    """A training that ended then; every tenth was preempted and never resumed."""
    key = f"train-{number:012x}"
    run, state = root / "runs" / key, "finished" if number % 10 else "preempted"
    claim = {
        "run_key": key,
        "attempt": 1,
        "job_id": f"{key}-a1",
        "owner": "ann@host:1",
        "nonce": key,
        "counter": 9,
        "heartbeat": at,
    }
    write(run / "claim.json", {"schema_version": 1, **claim})
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
        engines = Engines(settings, None, Terminal(), Shipper(settings, Path(folder)))  # type: ignore[arg-type]
        print(
            "| week | runs | objects | of journals | MB | checkpoints | list, s | collection, s |\n|---|---|---|---|---|---|---|---|"
        )
        for week in range(1, WEEKS + 1):
            for _ in range(num_runs * week // WEEKS - number):
                number += 1
                add_run(root, number, start + 7 * week * DAY_S)
            time.time = lambda now=start + 7 * week * DAY_S: now
            collect_s, _ = timed(lambda: collect_garbage(CollectGarbageRequest.model_validate(COLLECT), engines))
            if week % 13 == 0:
                files = [path for path in root.rglob("*") if path.is_file()]
                sizes, list_s = sum(path.stat().st_size for path in files) / 1e6, timed(lambda: list_runs(str(root)))[0]
                manifests = sum(path.name == "manifest.json" for path in files)
                journals = sum("journal" in path.parts for path in files)
                counts = f"{number:,} | {len(files):,} | {journals:,} | {sizes:.1f} | {manifests:,}"
                print(f"| {week} | {counts} | {list_s:.2f} | {collect_s:.2f} |", flush=True)
        time.time = real_time


def flow_run_year(num_flow_runs: int, database: Path | None) -> None:
    from flows.deployed import FLOW_NAMES
    from flows.on_prefect.prefect_observer import client

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
            newest_s, _ = timed(lambda: api.request("POST", "/flow_runs/filter", json=newest))
            return f"{count:,} flow runs, count {count_s:.2f} s, newest 200 {newest_s:.2f} s"

        with ThreadPoolExecutor(1) as pool:
            create_s, _ = timed(lambda: list(pool.map(create, range(num_flow_runs))))
        print(f"created in {create_s:.0f} s: {lists()}{size()}", flush=True)
        later = real_time() + 100 * DAY_S
        while True:
            seconds, found = timed(
                lambda: list(PrefectOldFlowRuns(FLOW_NAMES).collect(later - 90 * DAY_S, later - 2 * DAY_S, False))
            )
            print(
                f"collection of {seconds:.1f} s: {'; '.join(f'{f.subject} {f.action}' for f in found) or 'nothing'}; {lists()}{size()}",
                flush=True,
            )
            if not found:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("store", "flow-runs"))
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--flow-runs", type=int, default=10_000)
    parser.add_argument("--database", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "store":
        store_year(arguments.runs)
    else:
        flow_run_year(arguments.flow_runs, arguments.database)


if __name__ == "__main__":
    main()
