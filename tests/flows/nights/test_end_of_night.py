"""How a pipeline ends its night: the verdict is written first, under its claim, and changes nothing in how it ends."""

from contextlib import ExitStack
from dataclasses import replace
from datetime import date

import pytest

from flows import end_to_end
from flows.end_to_end import PipelineRecorder
from flows.nights.night_record import read_night
from flows.records import read_pipeline
from flows.requests.forms import PipelineRequest
from flows.requests.pipeline_plan import resolve_pipeline
from flows.stages.engines import open_engines
from flows.stages.stage import StageFailed, exclusively
from infra.settings import Settings
from infra.storage import open_store

from .simulated import Nights, store_night

NIGHT = date(2026, 11, 23)


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def recorder(root, store):
    """recorder(): that of a night with scores, as its pipeline has it before the end."""
    with ExitStack() as contexts:
        engines = contexts.enter_context(open_engines(Settings(root=root)))

        def begin():
            request = PipelineRequest(name="nightly", corpus="digits-0-to-4", recipe="digits", tasks=("digits-5-to-9",))
            plan = resolve_pipeline(root, request, NIGHT)
            stages = store_night(store, replace(Nights(0).night(), key=plan.key, night=NIGHT)).stages
            begun = PipelineRecorder(plan, engines, contexts.enter_context(exclusively(engines, plan.key)))
            begun.__enter__()
            begun.note(stages=tuple(stage.model_dump() for stage in stages))
            return begun

        yield begin


def test_a_finished_night_has_its_verdict_before_its_record_ends(store, recorder):
    begun = recorder()
    begun.end("finished")
    night = read_night(store, "nightly", NIGHT)
    assert (night.outcome, night.pipeline) == ("finished", begun.record.key)
    assert night.sentence == "Not compared: there is neither a champion nor an earlier whole night."
    assert night == begun.night
    assert night.at <= read_pipeline(store, begun.record.key).updated_at


def test_a_failed_night_is_broken(store, recorder):
    begun = recorder()
    error = StageFailed("the training diverged", "diverged")
    begun.__exit__(type(error), error, None)
    assert read_pipeline(store, begun.record.key).state == "diverged"
    assert read_night(store, "nightly", NIGHT).sentence == "Broken: the night diverged. the training diverged"


def test_a_verdict_that_cannot_be_made_fails_no_night(store, recorder, monkeypatch, capsys):
    def fail(*_):
        raise KeyError("scores")

    monkeypatch.setattr(end_to_end, "night_of", fail)
    begun = recorder()
    begun.end("finished")
    assert read_pipeline(store, begun.record.key).state == "finished"
    assert read_night(store, "nightly", NIGHT) is None
    assert "the verdict of this night could not be made: 'scores'" in capsys.readouterr().err
