"""The same work on s3:// and on file:// gives the same bytes, also where the store is slow, fails or is killed.

A real SeaweedFS; between it and the work stands a proxy where faults are wanted. CPU float32: bit for bit.
"""

import contextlib
import http.client
import itertools
import os
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from data_prep.config import CorpusConfig, Digits
from data_prep.corpora import presets
from data_prep.find_corpus import corpus_store
from data_prep.prepare import prepare
from data_prep.shards.verify_shards import verify_corpus
from infra.local.stack import find_stack, stack_environment, start_stack, stop_stack
from infra.runs.claims import ClaimHolder, read_claim, take_claim
from infra.runs.journal import read_journal
from infra.runs.run_state import read_state, request_stop
from infra.runs.stopping import StopPoller
from infra.storage import StoreFailed, open_store
from infra.stores import s3_store
from vit.config import TrainConfig
from vit.published import load_model
from vit.run import TrainingRun
from vit.run_spec import make_spec
from vit.training.checkpoint import list_checkpoints, newest_checkpoint
from vit.training.world import World

pytestmark = pytest.mark.s3
STEPS = 20


class Proxy(ThreadingHTTPServer):
    """Passes requests on to an S3 service. Every `every`-th suffers the next of `faults`; `down` refuses all."""

    daemon_threads = True

    def __init__(self, behind: str):
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind = behind.removeprefix("http://")
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.every, self.down, self.lock = 0, False, threading.Lock()
        self.count, self.faults, self.suffered = itertools.count(1), itertools.cycle(FAULTS), Counter()

    def fault(self) -> str:
        with self.lock:
            found = "503" if self.down else ""
            if self.every and next(self.count) % self.every == 0:
                found = next(self.faults)
            self.suffered[found] += 1
            return found


FAULTS = ("503", "reset", "reply lost", "reply cut", "slow")


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        if fault == "reset":
            return self.reset()
        if fault == "503":
            return self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
        if fault == "slow":
            time.sleep(0.2)
        inner = http.client.HTTPConnection(self.server.behind)
        with contextlib.closing(inner):
            inner.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the signature covers Host: it goes on as it is
                inner.putheader(name, value)
            inner.endheaders(body)
            reply = inner.getresponse()
            data = reply.read()
        if fault == "reply lost":
            return self.reset()
        kept = {n: v for n, v in reply.getheaders() if n.lower() not in ("content-length", "connection", "date")}
        if self.command == "HEAD":
            kept["Content-Length"] = reply.getheader("Content-Length", "0")
        self.answer(reply.status, kept, data, cut=fault == "reply cut")

    def answer(self, status, headers, data, cut=False):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.reset()

    def reset(self):
        self.connection.setsockopt(*LINGER)  # RST instead of an orderly end
        self.connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, *_):
        pass

    def handle_error(self, *_):  # a client that went away
        pass


LINGER = (1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER


@pytest.fixture
def proxy(s3_uri, monkeypatch):
    """A proxy in front of the service behind `s3_uri`; back-off is a hundredth of what it is."""
    monkeypatch.setattr(s3_store, "_FIRST_WAIT_S", 0.002)
    monkeypatch.setattr(s3_store, "_LONGEST_WAIT_S", 0.1)
    with Proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def own_store(tmp_path_factory):
    """A SeaweedFS of this module's own, which may be killed; its supervisor starts it again on the same data."""
    directory = tmp_path_factory.mktemp("stack")
    try:
        start_stack(directory, log_dir=directory / "logs", services=("s3",), announce=print)
        yield directory
    finally:
        stop_stack(directory)


@pytest.fixture
def own_uri(own_store, monkeypatch, request):
    env = stack_environment(own_store)
    if not env["VITLINE_ROOT"].startswith("s3://"):
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    for name, value in env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return f"{env['VITLINE_ROOT']}/{request.node.name}"


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
    spec = make_spec(config, root)
    run = open_store(root).child(f"runs/{spec.run_key}")
    claim = take_claim(run, spec.run_key, job_state=lambda job: "failed", owner="test")
    run.write_json("config.json", spec.model_dump(mode="json"))
    return run, claim.attempt


def at(config, corpus):
    return TrainConfig.model_validate(config.model_dump() | {"corpus": corpus.uri})


def outcome(run):
    """What must not depend on the store: losses, score, model, and which objects there are."""
    state = read_state(run)
    losses = {r.step: r.value for r in read_journal(run) if r.key == "train/loss"}
    kept = [key for key in run.list() if not key.startswith(("journal/", "starts/", "errors/", "claim"))]
    return losses, state["val_top1"], load_model(state["model"]).digest, kept


def copied(corpus, root):
    """The corpus below another root, object by object."""
    there = corpus_store(open_store(root), ZERO_AND_ONE)
    for key in corpus.list():
        there.write(key, corpus.read(key))
    return there


@pytest.fixture
def expected(train_config, on_disk, root):
    """What an undisturbed run on this machine's disk gives."""
    run, attempt = start(at(train_config("stores"), on_disk[0]), root)
    assert TrainingRun(run, attempt, World()).execute() == "finished"
    return outcome(run)


def test_corpus_losses_score_and_model_are_those_of_a_directory(s3_uri, on_disk, train_config, expected):
    corpus, manifest = prepared(s3_uri)
    assert manifest.digest == on_disk[1].digest
    assert corpus.list() == on_disk[0].list()
    assert verify_corpus(corpus).problems == {}
    run, attempt = start(at(train_config("stores"), corpus), s3_uri)
    assert TrainingRun(run, attempt, World()).execute() == "finished"
    assert outcome(run) == expected
    assert load_model(read_state(run)["model"]).classes == ("0", "1")


def test_a_service_that_fails_now_and_then_changes_nothing(proxy, s3_uri, on_disk, train_config, expected, monkeypatch):
    """Every seventh request meets an error, a reset before or after it was carried out, a cut reply, or waits."""
    monkeypatch.setattr(s3_store, "_PART_BYTES", 5 * 1024 * 1024)
    proxy.every = 7
    corpus, manifest = prepared(s3_uri)
    assert manifest.digest == on_disk[1].digest
    run, attempt = start(at(train_config("stores"), corpus), s3_uri)
    with ClaimHolder(run, attempt, every_s=0.02):
        assert TrainingRun(run, attempt, World()).execute() == "finished"
    assert outcome(run) == expected
    assert read_claim(run).attempt == attempt
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
    for part in ("put_object of", run.uri, "failed at attempt 9", "Check that the store runs"):
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
    checkpoints = [key for key in run.list("checkpoints/")]
    return losses, score, model, sorted([k for k in kept if not k.startswith("checkpoints/")] + checkpoints)


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
    """Killed while steps go on, a checkpoint is about to be written and the claim beats."""
    corpus = copied(on_disk[0], own_uri)
    run, attempt = start(at(train_config("stores"), corpus), own_uri)
    steps = itertools.count(1)
    monkeypatch.setattr(StopPoller, "asked", lambda watch: kill_store(own_store) if next(steps) == 8 else None)
    with ClaimHolder(run, attempt, every_s=0.1) as claim:
        assert TrainingRun(run, attempt, World()).execute() == "finished"
        assert claim.beat().attempt == attempt
    assert outcome(run) == expected
    assert find_stack(own_store).services[0].restarts >= 1
