"""The twin of `vitline plan cluster` against trainings on hosts: network namespaces, each with a Ray node of one CPU (tests/cluster).

    python -m tests.benchmarks.cluster_twin [--steps 1000] [--save-every 100] [--link-mbit 200] [--delay-ms 5] [--speed 0.5] [--rounds 1]

Two hosts train a small network on the digits, five times: undisturbed; with one host killed half a block after the checkpoint in the
middle, while a third host stands by; with one host whose packets arrive so many ms later; with one host that runs for only a share of
the time; and with a slow link, each host sending no more than so many Mbit/s. From the first training, and from nothing that the others
took, the twin says what these take: it knows the time of a step, of a start and what a save holds up, and counts bytes of gradients and
checkpoints as in a plan. Times begin when the attempt takes its lease and end with the last step.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from random import Random
from typing import NamedTuple

import psutil

from vitline.data_prep.examples import presets
from vitline.data_prep.prepare.job import prepare
from vitline.flows.catalog.records import list_run_keys
from vitline.flows.plans.cluster_plan import cluster_plan
from vitline.infra.config import replace
from vitline.infra.local.processes import tail
from vitline.infra.local.stack_config import BUCKET
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import read_lease
from vitline.infra.storage import Store, open_store
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.cluster_twin import Workload, simulate, step_time
from vitline.vit.cost.estimate import PlanGpus
from vitline.vit.run.resolved import resolve
from vitline.vit.run.run_spec import RunSpec, read_starts

from ..cluster.ray_hosts import RayHosts, ray_hosts

HOSTS, NODES, BATCH, LOGGED = 4, 2, 32, 10
ROOT = f"s3://{BUCKET}/root"
FAST = 1e9
"""Bytes per second between hosts without a limit, and decoded images: they cost nothing beside a step."""


class Figures(NamedTuple):
    """Seconds of a training."""

    start_s: float
    step_s: float
    stall_s: float
    """What a save adds to the step that follows."""
    wall_s: float

    def __str__(self) -> str:
        return f"start {self.start_s:.1f} s, a step {self.step_s:.4f} s, a save holds {self.stall_s:.2f} s"


class OneFailure(Random):
    """Of the waits for a failure the second one ends, which begins with the first step."""

    def __init__(self, after_s: float) -> None:
        super().__init__(0)
        self.waits = iter((float("inf"), after_s))

    def expovariate(self, lambd: float = 1.0) -> float:
        return next(self.waits, float("inf"))


def on_head(cluster: RayHosts, name: str, *words: str) -> "subprocess.Popen[bytes]":
    """Starts Python on the head."""
    variables = cluster.variables(ROOT) | {"PYTHONPATH": os.getcwd()}
    return cluster.hosts.start(cluster.head, [sys.executable, "-P", *words], cluster.log(name), variables)


def ended(cluster: RayHosts, name: str, process: "subprocess.Popen[bytes]") -> str:
    """What it has printed."""
    assert process.wait() == 0, tail(cluster.log(name))
    return cluster.log(name).read_text()


def call(cluster: RayHosts, function: str, *given: object) -> str:
    """What a function of this module prints on the head."""
    program = f"from {__spec__.name} import {function}; {function}{given!r}"
    return ended(cluster, function, on_head(cluster, function, "-c", program))


def prepare_digits() -> None:
    prepare([presets.digits()], ROOT)


def train(cluster: RayHosts, asked: argparse.Namespace, name: str, seed: int) -> "subprocess.Popen[bytes]":
    settings = {
        "recipe.total_steps": asked.steps,
        "recipe.input.global_batch_size": BATCH,
        "recipe.optim.warmup_steps": 10,
        "execution.device": "cpu",
        "execution.placement.node_labels.pool": "train",
        "execution.placement.environment.GLOO_SOCKET_IFNAME": "eth0",
        "execution.log_every_steps": LOGGED,
        "execution.save_every_steps": asked.save_every,
        "execution.keep_checkpoints": 1_000,
        "execution.inspect_images": 0,
    }
    options = [f"--name={name}", f"--seed={seed}", f"--num-workers={NODES}", "--corpus=digits", "--recipe=digits"]
    sets = [f"--set={field}={value}" for field, value in settings.items()]
    return on_head(cluster, name, "-m", "vitline.flows.cli.main", "pretrain", "run", *options, *sets)


def lose_a_host(cluster: RayHosts, asked: argparse.Namespace, training: "subprocess.Popen[bytes]") -> float:
    """Kills a host of the training `lost-host`, half a block after the checkpoint in the middle. Returns when, in Unix seconds."""
    before, middle = (awaited(cluster, asked.steps // 2 - step, training) for step in (asked.save_every, 0))
    time.sleep((middle - before) / 2)
    working = [host for host in cluster.hosts.names[1:] if any(map(trains, cluster.hosts.processes(host)))]
    cluster.hosts.kill(working[0])
    return time.time()


def awaited(cluster: RayHosts, step: int, training: "subprocess.Popen[bytes]") -> float:
    """When the checkpoint of a step of the training `lost-host` is seen, in Unix seconds."""
    while not any(
        f"step-{step:09d}" in key and key.endswith("manifest.json") for key in cluster.keys("root/runs/lost-host")
    ):
        assert training.poll() is None, f"no checkpoint of step {step:,} was seen"
        time.sleep(0.2)
    return time.time()


def trains(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "RayTrainWorker" in " ".join(process.cmdline())
    return False


def steps_of(run: Store) -> dict[int, float]:
    """When each logged step was done that was kept, in Unix seconds."""
    return {record.step: record.timestamp_ms / 1e3 for record in read_journal(run) if record.key == "train/loss"}


def figures_of(run: Store, every: int) -> Figures:
    at, lease = steps_of(run), read_lease(run)
    assert lease is not None
    assert lease.attempt == 1
    second = [start["at"] for start in read_starts(run)][1:]
    took = {
        step: (at[step] - at[before]) / (step - before)
        for before, step in pairwise(sorted(at))
        if not any(at[before] < began < at[step] for began in second)
    }
    plain = statistics.fmean(seconds for step, seconds in took.items() if step % every != LOGGED)
    stall = max(0.0, statistics.fmean(seconds for step, seconds in took.items() if step % every == LOGGED) - plain)
    first = min(at)
    return Figures(at[first] - first * plain - lease.began, plain, LOGGED * stall, max(at.values()) - lease.began)


def assumptions(known: Figures, **changes: float) -> ClusterAssumptions:
    assumed = ClusterAssumptions(
        gpus_per_node=1,
        step_scatter=0,
        decode_images_per_core_s=FAST,
        link_latency_s=0,
        link_bytes_per_s=FAST,
        store_node_bytes_per_s=FAST,
        save_stall_s=known.stall_s,
        start_s=known.start_s,
        replacement_s=0,
        failures_per_node_day=1,
    )
    return replace(assumed, **changes)


def said(work: Workload, assumed: ClusterAssumptions, failure_s: float = float("inf")) -> float:
    """Seconds until the last step, as the twin has it, with a failure so long after the first step."""
    simulated = simulate(work, assumed, NODES, OneFailure(failure_s))
    return simulated.wall_s - work.checkpoint_bytes / assumed.store_node_bytes_per_s


def compare(steps: int, every: int, link_mbit: float, delay_ms: float, speed: float, seed: int, killed: float) -> None:
    """Prints what the trainings with a seed took, and what the twin says. `killed`: when a host was, in Unix seconds."""
    root = open_store(ROOT)
    runs = dict[str, Store]()
    for run in (root.child(f"runs/{key}") for key in list_run_keys(root)):
        config = run.read_json("config.json")["config"]
        if config.get("recipe", {}).get("seed") == seed:
            runs[config["name"]] = run
    took = {name: figures_of(run, every) for name, run in runs.items()}
    known, lost = took["undisturbed"], took["lost-host"]
    config = RunSpec.model_validate(runs["undisturbed"].read_json("config.json")).config
    work = cluster_plan(resolve(config, ROOT), assumptions(known), PlanGpus(), BATCH / NODES / known.step_s).work

    said_s = said(work, assumptions(known))
    print(f"seed {seed}, load {os.getloadavg()[0]:.1f}; undisturbed: {known}, {against(said_s, known.wall_s)}")
    restart_s = min(when for when in steps_of(runs["lost-host"]).values() if when > killed) - killed
    block_s = every * known.step_s + known.stall_s
    said_s = said(work, assumptions(known), steps // 2 / every * block_s + every / 2 * known.step_s)
    print(
        f"  a host lost: {lost}, the next logged step that is kept {restart_s:.1f} s after it; {against(said_s, lost.wall_s)}"
    )
    link = link_mbit * 1e6 / 8
    changed = {
        # gloo asks the receiver before it sends a message.
        "distant-host": (f"{delay_ms:g} ms each way", {"link_latency_s": 2 * delay_ms / 1e3}),
        "slow-host": (f"a host of speed {speed:g}", {"slow_node_speed": speed}),
        "slow-link": (f"{link_mbit:g} Mbit/s", {"link_bytes_per_s": link, "store_node_bytes_per_s": link}),
    }
    for name, (what, changes) in changed.items():
        assumed = assumptions(known, **changes)
        step_s = step_time(work, assumed, NODES).step_s
        print(
            f"  {what}, {work.sent_bytes / 1e6:.2f} MB of gradients: {took[name]}; a step {against(step_s, took[name].step_s)}",
            end="; ",
        )
        print(f"all of it {against(said(work, assumed), took[name].wall_s)}")


def against(said_s: float, took_s: float) -> str:
    return f"took {took_s:.3g} s, the twin says {said_s:.3g} s ({said_s / took_s - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--link-mbit", type=float, default=200)
    parser.add_argument("--delay-ms", type=float, default=5)
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    if asked.steps % (2 * asked.save_every):
        parser.error(f"--steps {asked.steps} must be a multiple of twice --save-every {asked.save_every}")
    for seed in range(asked.rounds):
        with ray_hosts(HOSTS) as cluster, cluster.hosts.inside(cluster.head):
            workers = cluster.hosts.names[1:]
            cluster.join(workers, labels="pool=train")
            call(cluster, "prepare_digits")
            ended(cluster, "undisturbed", train(cluster, asked, "undisturbed", seed))
            training = train(cluster, asked, "lost-host", seed)
            killed = lose_a_host(cluster, asked, training)
            ended(cluster, "lost-host", training)
            left = [host for host in workers if cluster.hosts.processes(host)]
            with cluster.hosts.distant(left[0], asked.delay_ms / 1e3):
                ended(cluster, "distant-host", train(cluster, asked, "distant-host", seed))
            with cluster.hosts.slow(left[0], asked.speed):
                ended(cluster, "slow-host", train(cluster, asked, "slow-host", seed))
            for host in left:
                cluster.hosts.limit(host, asked.link_mbit * 1e6 / 8)
            ended(cluster, "slow-link", train(cluster, asked, "slow-link", seed))
            given = (asked.steps, asked.save_every, asked.link_mbit, asked.delay_ms, asked.speed, seed, killed)
            print(call(cluster, "compare", *given), flush=True)


if __name__ == "__main__":
    main()
