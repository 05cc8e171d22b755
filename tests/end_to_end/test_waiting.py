"""Runs that wait while another training runs: how long, what they report, and what lets them start."""

import pytest

from vitline.flows.ops.preempt import preempt
from vitline.infra.runs.lease import job_id_of, read_lease
from vitline.infra.runs.run_state import read_state

from ..servers.stack import TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
LONG = 1_000_000  # steps: hours
SHORT_S = 4  # how long a run without a deadline waits


def test_runs_wait_for_a_training_or_give_up_and_name_it(work):
    """The stack has a second CPU, yet trainings run one after the other. A run with a deadline waits until the training is
    preempted, and starts before that training resumes. One without ends by its queue timeout, and one is cancelled."""
    first = work.pretrain("in-the-way", LONG)
    in_the_way = work.key(first)
    work.reach(in_the_way, 5)
    hint = f"other running jobs: {job_id_of(work.run(in_the_way), in_the_way, 1)} (`vitline ops preempt {in_the_way}` makes room"

    with work.frozen_training():
        training, key = check_queue(work, hint)
    preempt(work.root.uri, in_the_way)
    work.flows.completes(training)
    assert read_lease(work.run(key)).attempt == 1
    work.eventually(lambda: read_state(work.run(in_the_way)).get("from_step", 0) > 0)
    assert read_state(work.run(in_the_way))["attempt"] == 2


def cancel_a_queued_run(work, hint):
    before = work.workers()
    run = work.pretrain("cancel-queued", LONG)
    key = work.key(run)
    work.eventually(lambda: any(hint in line for line in work.flows.lines(run)))
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)


def check_queue(work, hint):
    """A pipeline waits, one run gives up, and one is cancelled; the pipeline's training, as flow run and by its key."""
    overrides = TINY["overrides"] | {
        "recipe.seed": 3,
        "execution.queue_timeout_s": SHORT_S,
    }
    waiting = work.start("pretrain-then-transfer/tiny", name="waits", overrides=overrides, deadline_hours=1)
    gives_up = work.pretrain("gives-up", 5, queue_timeout_s=SHORT_S)
    key = work.key(waiting)
    training = work.eventually(lambda: work.flows.parts(waiting)[1:])[0]["id"]
    work.eventually(lambda: any(hint in line for line in work.flows.lines(training)))
    work.eventually(lambda: any(hint in page["description"] for page in work.flows.artifacts(training).values()))
    ended = work.flows.wait(gives_up, timeout_s=900)
    assert ended["state_name"] == "Failed"
    for part in ("no room for 1 workers", hint):
        assert part in ended["state"]["message"]

    cancel_a_queued_run(work, hint)
    assert read_state(work.run(key)) is None
    assert work.flows.find(waiting)["state_name"] == "Running"
    return training, key
