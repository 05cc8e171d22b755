"""The same work on s3:// and on file:// gives the same bytes, also where the store is slow, fails or is killed.

A real SeaweedFS; between it and the work stands a proxy where faults are wanted. CPU float32: bit for bit.
"""

import itertools
import re

import psutil
import pytest

from vitline.data_prep.config import CorpusConfig, Digits
from vitline.data_prep.examples import presets
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.local.stack import find_stack, stack_environment, start_stack, stop_stack
from vitline.infra.runs.lease import LeaseHolder, read_lease
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import StoreFailed, open_store
from vitline.infra.stores import remote_store
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.checkpoints.restore import newest_checkpoint
from vitline.vit.config import TrainConfig
from vitline.vit.published.models import load_model
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World

from ..servers.faulty_s3 import FAULTS
from ..servers.stack import own_ports, use_s3
from ..trainings import begin, finish, outcome_of

pytestmark = pytest.mark.s3
STEPS = 20


@pytest.fixture(scope="module")
def own_store(tmp_path_factory):
    """A SeaweedFS of this module's own, which may be killed; its supervisor starts it again on the same data."""
    directory = tmp_path_factory.mktemp("stack")
    try:
        start_stack(
            directory, log_dir=directory / "logs", services=("s3",), ports={"s3": own_ports()["s3"]}, announce=print
        )
        yield directory
    finally:
        stop_stack(directory)


@pytest.fixture
def own_uri(own_store, monkeypatch, request):
    return f"{use_s3(stack_environment(own_store), monkeypatch)}/{request.node.name}"


def kill_store(directory):
    (service,) = find_stack(directory).services
    psutil.Process(service.pid).kill()


# Fewer digits than other tests have: every example costs an object store several requests.
ZERO_AND_ONE = CorpusConfig(
    name="zero-and-one", source=Digits(digits=(0, 1), num_train=200, num_val=40), recipe=presets.digits().recipe
)


def prepared(root):
    (manifest,) = prepare([ZERO_AND_ONE], root)
    return corpus_store(open_store(root), ZERO_AND_ONE), manifest


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The corpus on this machine's disk, and its manifest."""
    return prepared(str(tmp_path_factory.mktemp("digits")))


def start(config, root):
    """The run and attempt of a claimed spec, as a flow leaves it for the driver."""
    run, lease = begin(config, root)
    return run, lease.attempt


def at(config, corpus):
    return TrainConfig.model_validate(config.model_dump() | {"corpus": corpus.uri})


def outcome(run):
    """What must not depend on the store: losses, score, model, and which objects there are."""
    kept = [key for key in names(run) if not key.startswith(("journal/", "starts/", "errors/", "lease"))]
    return *outcome_of(run), kept


def names(run, prefix=""):
    """Keys of its objects, without the time of the start that a checkpoint's objects have in their names."""
    return [re.sub(r"-\d{13}-", "-<start>-", key) for key in run.list(prefix)]


def copied(corpus, root):
    """The corpus below another root, object by object."""
    there = corpus_store(open_store(root), ZERO_AND_ONE)
    for key in corpus.list():
        there.write(key, corpus.read(key))
    return there


@pytest.fixture
def expected(train_config, on_disk, root):
    """What an undisturbed run on this machine's disk gives."""
    return outcome(finish(at(train_config("stores"), on_disk[0]), root))


def test_corpus_losses_score_and_model_are_those_of_a_directory(s3_uri, on_disk, train_config, expected):
    corpus, manifest = prepared(s3_uri)
    assert manifest.digest == on_disk[1].digest
    assert corpus.list() == on_disk[0].list()
    assert verify_corpus(corpus).problems == {}
    run = finish(at(train_config("stores"), corpus), s3_uri)
    assert outcome(run) == expected
    assert load_model(read_state(run)["model"]).classes == ("0", "1")


def test_a_service_that_fails_now_and_then_changes_nothing(proxy, s3_uri, on_disk, train_config, expected, monkeypatch):
    """Every seventh request meets an error, a reset before or after it was carried out, a cut reply, or waits."""
    monkeypatch.setattr(remote_store, "PART_BYTES", 5 * 1024 * 1024)
    proxy.every = 7
    corpus, manifest = prepared(s3_uri)
    assert manifest.digest == on_disk[1].digest
    run, attempt = start(at(train_config("stores"), corpus), s3_uri)
    with LeaseHolder(run, attempt, every_s=0.02):
        assert TrainingRun(run, attempt, World()).execute() == "finished"
    assert outcome(run) == expected
    assert read_lease(run).attempt == attempt
    assert set(proxy.suffered) == {"", *FAULTS}
    assert open_store(s3_uri).leftovers(older_than_s=-60) == []


def test_a_store_that_stays_away_is_named_and_what_was_saved_goes_on(
    proxy, s3_uri, on_disk, train_config, expected, monkeypatch
):
    corpus = copied(on_disk[0], s3_uri)
    run, attempt = start(at(train_config("stores", save_every_steps=5), corpus), s3_uri)
    steps = itertools.count(1)

    def asked(watch):
        proxy.down = next(steps) >= 12
        return None

    with monkeypatch.context() as patch:
        patch.setattr(StopPoller, "asked", asked)
        with pytest.raises(StoreFailed) as failed:
            TrainingRun(run, attempt, World()).execute()
    assert failed.value.status == 503
    for part in ("get_object of", run.uri, "lease.json", "failed at attempt 9", "Check that the store runs"):
        assert part in str(failed.value)
    proxy.down = False
    step = newest_checkpoint(run, rejected=pytest.fail)[0].step
    assert step in (5, 10)
    assert len(list_checkpoints(run)) == step // 5
    assert TrainingRun(run, attempt, World()).execute() == "finished"  # as Ray Train calls it again
    assert outcome(run) == expected_with(expected, run)


def expected_with(expected, run):
    """The undisturbed outcome, with the checkpoints of a run that saves more often."""
    losses, score, model, kept = expected
    others = [key for key in kept if not key.startswith("checkpoints/")]
    return losses, score, model, sorted(others + names(run, "checkpoints/"))


def test_faulty_ranges_cost_no_checkpoint(proxy, s3_uri, on_disk, train_config, expected, monkeypatch):
    """Ignored, answered with other bytes all the time or once: the run stops or reads again, and resumes where it was."""
    config = at(train_config("stores"), on_disk[0])
    run, attempt = start(config, s3_uri)
    with monkeypatch.context() as patch:
        steps = itertools.count(1)
        patch.setattr(StopPoller, "asked", lambda watch: "preempted" if next(steps) == 12 else None)
        assert TrainingRun(run, attempt, World()).execute() == "preempted"
    saved = {key: run.read(key) for key in run.list("checkpoints/")}
    run, attempt = start(config, s3_uri)
    proxy.range_faults = itertools.repeat("ignored")
    with pytest.raises(StoreFailed, match="header Range"):
        TrainingRun(run, attempt, World()).execute()
    proxy.range_faults = itertools.repeat("garbled")
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    for part in ("None of the", "sha256", *{key.rpartition("/")[0] for key in saved}):
        assert part in read_state(run)["reason"]
    assert {key: run.read(key) for key in saved} == saved
    proxy.range_faults = iter(())
    assert newest_checkpoint(run, rejected=pytest.fail)[0].step == 12
    run.delete("checkpoints/step-000000012-a1/rejected.json")
    run, attempt = start(config, s3_uri)
    proxy.range_faults = iter(["garbled"])
    assert TrainingRun(run, attempt, World()).execute() == "finished"
    assert next(proxy.range_faults, None) is None
    assert outcome(run)[:3] == expected[:3]
    assert not [key for key in run.list("checkpoints/") if key.endswith("rejected.json")]


def test_a_stop_is_heard_once_the_store_is_back(proxy, s3_uri):
    run = open_store(s3_uri).child("runs/a")
    proxy.down = True
    with StopPoller(run, 1) as watch:
        assert watch.asked() is None
        proxy.down = False
        request_stop(run, "cancelled", by="test", attempt=1)
        watch.read()
        assert watch.asked() == "cancelled"


def test_a_store_killed_in_mid_training_is_waited_for(own_store, own_uri, on_disk, train_config, expected, monkeypatch):
    """Killed while steps go on, a checkpoint is about to be written and the lease beats."""
    corpus = copied(on_disk[0], own_uri)
    run, attempt = start(at(train_config("stores"), corpus), own_uri)
    steps = itertools.count(1)
    monkeypatch.setattr(StopPoller, "asked", lambda watch: kill_store(own_store) if next(steps) == 8 else None)
    with LeaseHolder(run, attempt, every_s=0.1) as lease:
        assert TrainingRun(run, attempt, World()).execute() == "finished"
        assert lease.beat().attempt == attempt
    assert outcome(run) == expected
    assert find_stack(own_store).services[0].restarts >= 1
