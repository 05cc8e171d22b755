"""A training on Ray whose input processes read shards from S3: kills of them and of the worker change no loss.

CPU float32, compared bit for bit with a training that reads files and has no input processes.
"""

import contextlib

import psutil
import pytest

from vitline.infra.config import replace
from vitline.infra.local.stack import stack_environment, start_stack, stop_stack
from vitline.infra.storage import open_store
from vitline.vit.run.resolved import resolve

from ..eventually import eventually
from ..servers.stack import own_ports, use_s3
from ..trainings import outcome_of
from .test_kills import KilledTraining, Session, slow_config, training_workers  # noqa: F401
from .undisturbed import train_undisturbed

pytestmark = [pytest.mark.long, pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def on_s3(tmp_path_factory):
    """A Ray of this module's own, whose root is in a SeaweedFS of its own."""
    directory = tmp_path_factory.mktemp("stack")
    try:
        start_stack(
            directory, log_dir=directory / "logs", services=("s3",), ports={"s3": own_ports()["s3"]}, announce=print
        )
        with pytest.MonkeyPatch.context() as patch:
            root = use_s3(stack_environment(directory), patch)
            session = Session(root, tmp_path_factory.mktemp("logs"))
            try:
                yield session
            finally:
                session.cluster.__exit__()
    finally:
        stop_stack(directory)


class ReadingProcesses(KilledTraining):
    """A training of one worker with two input processes."""

    def input_processes(self):
        (worker,) = training_workers(self.session)
        found = []
        for process in worker.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "vitline.vit.input.decoding" in process.cmdline():
                    found.append(process)
        return found

    def kill_input_process(self):
        before = self.input_processes()
        assert len(before) == 2
        before[1].kill()
        self.wait_for_checkpoint(after="the kill of an input process")
        (error,) = (self.run.read_json(key) for key in self.run.list("errors/"))
        assert f"Input process 2 of 2 (pid {before[1].pid}) ended by SIGKILL" in str(error)
        return before

    def kill_worker(self):
        before = self.input_processes()
        assert len(before) == 2
        training_workers(self.session)[0].kill()
        self.wait_for_checkpoint(after="the kill of the worker")
        return before


@pytest.fixture
def alone(slow_config):  # noqa: F811
    return replace(slow_config, **{"execution.num_workers": 1})


@pytest.fixture
def corpus_on_s3(on_s3, digits):
    corpus = open_store(f"{on_s3.root}/corpora/{'/'.join(digits.uri.split('/')[-2:])}")
    for key in digits.list():
        corpus.write(key, digits.read(key))
    return corpus.uri


@pytest.fixture
def expected(alone, tmp_path):
    return outcome_of(train_undisturbed(resolve(alone, str(tmp_path)).spec(), str(tmp_path)))


def have_ended(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_kills_of_input_processes_and_worker_change_no_loss(on_s3, alone, corpus_on_s3, expected):
    config = replace(alone, corpus=corpus_on_s3, **{"execution.decode_processes": 2})
    training = ReadingProcesses(on_s3, config, expected.losses)
    training.start_attempt(1)
    training.wait_for_checkpoint(after="nothing")
    killed = [*training.kill_input_process(), *training.kill_worker(), *training.input_processes()]
    assert training.finish() == expected
    assert len(training.run.list("starts/")) == 3
    eventually(lambda: have_ended(killed), awaited="their end")
