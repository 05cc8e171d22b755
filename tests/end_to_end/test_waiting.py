"""Runs that wait while another training is at work: how long, what they report, and what lets them go first."""

import secrets

import pytest

from flows.ops.preempt import preempt
from infra.runs.claims import read_claim
from infra.runs.run_state import read_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = 1_000_000  # steps: hours
SHORT_S = 4  # what a run waits that has no deadline


@pytest.fixture
def in_the_way(work):
    """A training of one worker, at work; the stack has a second CPU, yet trainings go one after the other."""
    # A name of its own: the same request would go on from the progress of the test before, as if it were at work.
    first = work.pretrain(f"in-the-way-{secrets.token_hex(3)}", LONG, num_workers=1)
    key = work.key(first)
    work.reach(key, 5)
    return key


def test_a_run_with_a_deadline_waits_until_the_training_in_its_way_is_preempted(work, pipelines, in_the_way):
    """It says what to do, that is done, and both go on: the run that waited first."""
    overrides = pipelines.record.request["overrides"] | {
        "recipe.seed": 3,
        "execution.num_workers": 1,
        "execution.queue_timeout_s": SHORT_S,
    }
    run = work.start("pretrain-then-transfer/tiny", name="waits", overrides=overrides, deadline_hours=1)
    key = work.key(run)
    expected = f"other running jobs: {in_the_way}-a1 (`vitline ops preempt {in_the_way}` makes room"
    training = work.eventually(lambda: work.flows.parts(run)[1:])[0]["id"]
    work.eventually(lambda: any(expected in line for line in work.flows.lines(training)))
    pages = work.flows.artifacts(training).values()
    assert any(expected in page["description"] for page in pages), pages
    assert read_state(work.run(key)) is None
    assert work.flows.find(run)["state_name"] == "Running"

    preempt(work.root.uri, in_the_way)
    ended = work.flows.wait(run, timeout_s=900)
    assert ended["state_name"] == "Completed", f"{ended['state']}: {work.flows.lines(run)}"
    assert read_claim(work.run(key)).attempt == 1
    work.eventually(lambda: read_state(work.run(in_the_way)).get("from_step", 0) > 0)
    assert read_state(work.run(in_the_way))["attempt"] == 2


def test_a_run_without_a_deadline_ends_by_its_queue_timeout_and_names_the_training_in_its_way(work, in_the_way):
    run = work.pretrain("in-vain", 5, num_workers=1, queue_timeout_s=SHORT_S)
    ended = work.flows.wait(run, timeout_s=900)
    assert ended["state_name"] == "Failed"
    message = ended["state"]["message"]
    assert "no room for 1 workers" in message
    assert f"other running jobs: {in_the_way}-a1" in message
    assert f"`vitline ops preempt {in_the_way}`" in message
