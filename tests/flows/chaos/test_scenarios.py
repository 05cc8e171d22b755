"""Every scenario finds its promise kept, and broken where the product is made to break it."""

import contextlib
import hashlib
import itertools
import math
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from vitline.data_prep import parquet_files
from vitline.data_prep.plan import check_refused
from vitline.data_prep.shard_format import open_checked
from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.faults import checkpoint_faults, claim_faults, data_faults, process_faults, store_faults
from vitline.infra.runs import claims, watching
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.infra.stores import s3_store
from vitline.infra.stores.file_store import FileStore
from vitline.vit import run as vit_run
from vitline.vit.training import tensor_file, train

from .scenarios import scenarios_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("chaos"))
    return Bench(Settings(root=root), open_store(root))


@pytest.fixture
def fresh(bench):
    """The bench with a place of its own, and the corpus and undisturbed result of the shared one."""
    corpus, undisturbed, number = bench.corpus, bench.undisturbed, next(_NUMBERS)
    fresh = Bench(bench.settings, bench.place.child(f"broken-{number}"))
    fresh.__dict__ |= {"corpus": corpus, "undisturbed": undisturbed}
    return fresh


_NUMBERS = itertools.count()


@pytest.fixture
def s3_bench(s3_uri):
    return Bench(Settings(root=s3_uri), open_store(s3_uri))


EVERYWHERE = [
    param for family in (claim_faults, process_faults, checkpoint_faults, data_faults) for param in scenarios_in(family)
]


@pytest.mark.parametrize("scenario", EVERYWHERE)
def test_promise_is_kept_on_a_disk(scenario, bench):
    result = scenario.run(bench)
    assert result.verdict == "kept", result
    assert result.promise
    assert result.found


@pytest.mark.parametrize("scenario", scenarios_in(store_faults))
def test_promise_about_a_faulty_store_is_kept(scenario, s3_bench):
    result = scenario.run(s3_bench)
    assert result.verdict == "kept", result


@pytest.mark.parametrize(
    "scenario", [claim_faults.two_starters, claim_faults.suspended_holder, process_faults.full_disk]
)
def test_promise_is_kept_on_s3(scenario, s3_bench):
    result = scenario.run(s3_bench)
    assert result.verdict == "kept", result


@pytest.mark.parametrize("scenario", scenarios_in(store_faults))
def test_faults_of_a_network_are_not_tried_on_a_disk(scenario, bench):
    result = scenario.run(bench)
    assert result.verdict == "not tried"
    assert "file system" in result.found


def plain_create(store, key, data):
    store.write(key, data)
    return store.read_tagged(key)[1]


def by_comparing_clocks(claim, state, timeout_s, watch):
    if state is None and time.time() - claim.heartbeat <= timeout_s:
        raise claims.ClaimHeld(claim, "it beats")


def from_the_first_batch():
    """A resumed training starts with the batches of step 1."""
    real = vit_run.TrainingRun._train_batches
    return patch.object(vit_run.TrainingRun, "_train_batches", lambda run, step: real(run, 0))


BREAKS = {
    claim_faults.two_starters: lambda: patch.object(FileStore, "create", plain_create),
    claim_faults.clock_ahead: lambda: patch.object(claims, "_require_dead", by_comparing_clocks),
    claim_faults.suspended_machine: lambda: patch.object(watching, "_LONGEST_LOOK_S", math.inf),
    process_faults.killed_process: lambda: from_the_first_batch(),
    process_faults.full_disk: lambda: from_the_first_batch(),
    process_faults.full_file_system: lambda: from_the_first_batch(),
    checkpoint_faults.damaged_checkpoint: lambda: unchecked_tensors(),
    checkpoint_faults.no_whole_checkpoint: lambda: patch.object(vit_run, "resume", lambda *_: None),
    checkpoint_faults.nan_in_one_step: lambda: every_gradient_is_applied(),
    checkpoint_faults.nan_for_good: lambda: patch.object(train.NonfiniteSteps, "read", lambda *_: 0),
    data_faults.swapped_shards: lambda: unchecked_shards(),
    data_faults.damaged_shard: lambda: unverified_pages(),
    data_faults.odd_pictures: lambda: patch.object(check_refused, "_too_many", lambda *_: "too many"),
    data_faults.too_many_odd_pictures: lambda: patch.object(check_refused, "_too_many", lambda *_: ""),
    data_faults.wrong_parameters: lambda: patch.object(data_faults, "resolve_pretrain", lambda root, request: None),
}


@contextlib.contextmanager
def unchecked_shards():
    with (
        patch.object(open_checked, "check_identity", lambda *_: None),
        patch.object(open_checked, "check_key", lambda *_: None),
    ):
        yield


def unverified_pages():
    real = parquet_files.pq.ParquetFile
    unchecked = {"page_checksum_verification": False}
    return patch.object(parquet_files.pq, "ParquetFile", lambda file, **options: real(file, **options | unchecked))


def every_gradient_is_applied():
    return patch.object(train, "step_where_finite", lambda optimizer, finite: optimizer.step())


def unchecked_tensors():
    """Tensors are read without comparing their sha256."""

    class Equal(str):
        def __ne__(self, other):
            return False

        __hash__ = str.__hash__

    class Sha256:
        def __init__(self, data=b""):
            self.real = hashlib.sha256(data)
            self.update, self.digest = self.real.update, self.real.digest

        def hexdigest(self):
            return Equal(self.real.hexdigest())

    return patch.object(tensor_file, "hashlib", SimpleNamespace(sha256=Sha256))


@pytest.mark.parametrize("scenario", BREAKS, ids=lambda scenario: scenario.name)
def test_scenario_finds_a_broken_promise(scenario, fresh):
    with BREAKS[scenario]():
        result = scenario.run(fresh)
    assert result.verdict == "broken", result


S3_BREAKS = {
    store_faults.failing_store: lambda: patch.object(s3_store, "_ATTEMPTS", 1),
    store_faults.lost_store: lambda: from_the_first_batch(),
    store_faults.ignored_ranges: lambda: patch.object(
        s3_store, "_announced_bytes", lambda reply, span: reply["ContentLength"]
    ),
    store_faults.garbled_ranges: lambda: unchecked_tensors(),
}


@pytest.mark.parametrize("scenario", S3_BREAKS, ids=lambda scenario: scenario.name)
def test_scenario_finds_a_promise_broken_by_a_store(scenario, s3_bench):
    _ = s3_bench.undisturbed
    with S3_BREAKS[scenario]():
        result = scenario.run(s3_bench)
    assert result.verdict == "broken", result
