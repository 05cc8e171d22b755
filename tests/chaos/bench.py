"""What faults befall: a place with a tiny corpus, and trainings that take seconds."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, Digits, ShardingConfig
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.children import child_environment, end_with_parent
from vitline.infra.runs.lease import acquire_lease, read_lease
from vitline.infra.runs.run_state import NO_STATE, RunState, read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import Store
from vitline.vit.config import TrainConfig
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training import fit
from vitline.vit.training.world import World

from ..trainings import Outcome, begin, outcome_of, tiny_config

STEPS, SAVE_EVERY = 20, 5
CORPUS = CorpusConfig(
    name="chaos-digits",
    source=Digits(digits=(0, 1), num_train=160, num_val=40),
    recipe=CorpusRecipe(
        duplicates="keep", sharding=ShardingConfig(row_group_bytes=1_000, min_row_groups=8, shard_bytes=4_000)
    ),
)


class Training:
    """One run of the tiny training, attempt by attempt, without a cluster. Made with the lease of its first attempt."""

    def __init__(self, root: str, config: TrainConfig) -> None:
        self.run, lease = begin(config, root)
        self.key, self.attempt = lease.run_key, lease.attempt

    @classmethod
    def of(cls, run: Store, key: str) -> "Training":
        """A run that was made and claimed elsewhere."""
        training = cls.__new__(cls)
        training.key, training.run, training.attempt = key, run, holder(run)
        return training

    def lease(self) -> int:
        """The next attempt, as after the job of the one before has ended."""
        self.attempt = acquire_lease(self.run, self.key, job_state=lambda job: "failed", owner="chaos").attempt
        return self.attempt

    def train(self) -> RunState | None:
        """Trains to the end of the attempt, in this process, on one thread as in a worker with one CPU."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return TrainingRun(self.run, self.attempt, World()).execute()
        finally:
            torch.set_num_threads(threads)

    @contextlib.contextmanager
    def child(self, fault: str, at: int = 0) -> Iterator["subprocess.Popen[str]"]:
        """The attempt in a process of its own, which brings `fault` upon itself after step `at`; see `child_attempt`."""
        command = [sys.executable, "-P", "-m", "tests.chaos.child_attempt", "--run", self.run.uri]
        command += ["--attempt", str(self.attempt), "--fault", fault, "--at", str(at)]
        with child_process(command) as child:
            yield child

    @property
    def reason(self) -> str:
        """The reason in `state.json`; empty without one."""
        return (read_state(self.run) or NO_STATE).get("reason", "")

    @property
    def outcome(self) -> Outcome:
        """Fails unless the run is finished."""
        return outcome_of(self.run)

    def objects(self) -> dict[str, bytes]:
        """Every object of the run but the lease."""
        return {key: self.run.read(key) for key in self.run.list() if key != "lease.json"}


class Bench:
    """A store and the tiny corpus in it. Nothing is written outside of it."""

    def __init__(self, settings: Settings, place: Store) -> None:
        self.settings, self.place = settings, place

    @property
    def on_s3(self) -> bool:
        return self.place.uri.startswith("s3://")

    @cached_property
    def corpus(self) -> Store:
        """Two digits in several shards, prepared once."""
        prepare([CORPUS], self.place.uri)
        return corpus_store(self.place, CORPUS)

    def config(self, name: str) -> TrainConfig:
        return tiny_config(f"chaos-{name}", self.corpus.uri, steps=STEPS, save_every_steps=SAVE_EVERY, device="cpu")

    def training(self, name: str) -> Training:
        return Training(self.place.uri, self.config(name))

    @cached_property
    def undisturbed(self) -> Outcome:
        """What the training gives if nothing goes wrong."""
        training = self.training("undisturbed")
        training.train()
        return training.outcome

    def require_undisturbed(self, training: Training) -> None:
        """Fails unless a training has ended bit for bit as the undisturbed one."""
        found, expected = training.outcome, self.undisturbed
        differ = sorted(
            step
            for step in found.losses.keys() | expected.losses.keys()
            if found.losses.get(step) != expected.losses.get(step)
        )
        assert not differ, f"{training.key} has other losses than an undisturbed training at the steps {differ}"
        assert found == expected, f"{training.key} has another score or other weights than an undisturbed training"


@contextlib.contextmanager
def child_process(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A child that ends with this process, and is killed at the end of the context."""
    child = subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def holder(run: Store) -> int:
    """The attempt that holds the lease of a run; 0 without one."""
    lease = read_lease(run)
    return lease.attempt if lease else 0


def from_the_first_batch() -> Any:
    """A product that is broken on purpose: while it is open, a resumed training starts with the batches of step 1."""
    real = fit.source_batches
    return patch.object(fit, "source_batches", lambda *args, **options: real(*args, **{**options, "start_step": 0}))
