"""`nights.advance_images`: one long pre-training goes on a part a night, and a cooldown from where it stands is scored.
`nights.cooldown_at_hours`: so is that of a training that is out of time."""

import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from vitline.flows.catalog.records import PipelineRecord, StageRecord, list_pipeline_keys, read_pipeline, write_pipeline
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.plans.budget import check_deadline
from vitline.flows.runs.end_to_end import PipelineRecorder, advance_long_run, train_until_cooldown
from vitline.flows.runs.long_run import next_step
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import StageFailed, exclusively
from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.published.model_record import published_record
from vitline.vit.run.resolved import resolve

LONG = {"nights.advance_images": 64_000, "nights.cooldown_images": 12_800}


def plan_of(root, night=datetime(2026, 11, 23, 2, tzinfo=UTC), overrides=LONG, **changes):
    given = {"name": "long", "corpus": "digits-0-to-4", "recipe": "digits", "tasks": ("digits-5-to-9",), **changes}
    return resolve_pipeline(root, PipelineRequest(overrides=overrides, **given), night)


@pytest.mark.parametrize(("newest", "step"), [(None, 7), (6, 7), (7, 14), (9, 14), (14, 20), (20, 20)])
def test_a_night_goes_to_the_next_part_after_the_newest_checkpoint_and_the_last_to_the_end(
    root, train_config, newest, step
):
    run = open_store(root)
    if newest:
        run.write_json(f"checkpoints/step-{newest:09d}-a1/manifest.json", {})
    assert next_step(train_config("long").recipe, 7 * 16 + 3, run) == step


def test_a_part_does_not_end_within_the_own_cooldown_of_the_long_run(root, train_config):
    recipe = replace(train_config("long").recipe, **{"optim.cooldown_steps": 5})
    assert [next_step(recipe, steps * 16, open_store(root)) for steps in (15, 16)] == [15, 20]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"nights.cooldown_images": None},
            "nights.advance_images=64000 and nights.cooldown_images=None belong together",
        ),
        ({"nights.num_seeds": 3}, "nights.num_seeds=3 is not supported with nights.advance_images"),
        ({"nights.ingest": True}, "nights.ingest is not supported with nights.advance_images"),
        ({"nights.advance_images": 15_000}, "ends within the warmup.* at least 15,488, the warmup of 120 steps"),
        ({"nights.cooldown_images": 100}, "nights.cooldown_images=100 is less than one batch of 128 images"),
    ],
)
def test_what_does_not_go_together_is_refused(root, changes, refusal):
    with pytest.raises(ValueError, match=refusal):
        plan_of(root, overrides=LONG | changes)


IN_TIME = {"nights.cooldown_at_hours": 2, "nights.cooldown_images": 28_800}


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"nights.cooldown_images": None}, "cooldown_at_hours=2.0 and nights.cooldown_images=None belong together"),
        ({"nights.num_seeds": 3}, "nights.num_seeds=3 is not supported with nights.cooldown_at_hours"),
        ({"nights.advance_images": 64_000}, "cooldown_at_hours=2 is not supported with nights.advance_images"),
        ({"nights.cooldown_at_hours": 3}, "cooldown_at_hours=3 is not before deadline_hours=3"),
        ({"recipe.optim.cooldown_steps": 5}, "not supported with recipe.optim.cooldown_steps=5"),
    ],
)
def test_what_does_not_go_with_a_cooldown_in_time_is_refused(root, changes, refusal):
    with pytest.raises(ValueError, match=refusal):
        plan_of(root, overrides=IN_TIME | changes, deadline_hours=3)


def test_a_cooldown_has_to_fit_between_its_begin_and_the_deadline(root, monkeypatch):
    plan = plan_of(root, overrides=IN_TIME, deadline_hours=3)
    assert check_deadline(root, plan).endswith("28,800 images; no earlier run of this network has a known rate")
    whenever = plan_of(root, overrides=IN_TIME)
    assert check_deadline(root, whenever).startswith("no deadline: a training that is not done after 2 h is cooled")
    monkeypatch.setattr("vitline.flows.plans.budget.known_images_per_s", lambda *_: 16.0)
    assert check_deadline(root, plan).endswith("28,800 images, which take 0.50 h at 16 images/s")
    monkeypatch.setattr("vitline.flows.plans.budget.known_images_per_s", lambda *_: 4.0)
    with pytest.raises(ValueError, match=r"take 2\.00 h .* there are 1 h, .* Set fewer than 14,400 images"):
        check_deadline(root, plan)


def test_the_deadline_counts_what_is_trained_tonight(root, monkeypatch):
    monkeypatch.setattr("vitline.flows.plans.budget.known_images_per_s", lambda *_: 8.0)
    fits, short = (plan_of(root, deadline_hours=hours) for hours in (3, 2))
    said = "deadline of 3 h: 76,800 images take 2.67 h at 8 images/s"
    assert check_deadline(root, fits) == f"{said}; how long the transfer takes is not known yet"
    with pytest.raises(ValueError, match=r"Set nights\.advance_images to at most 44,800"):
        check_deadline(root, short)


def test_the_deadline_counts_the_transfer_as_it_was_last_time(root, monkeypatch):
    monkeypatch.setattr("vitline.flows.plans.budget.known_images_per_s", lambda *_: 8.0)
    plan = plan_of(root, deadline_hours=3)

    def last_time(*hours, plan=plan, protocol=None, reused=False, resumed=False, **request):
        stages = [
            StageRecord(
                stage="evaluate",
                run_key="e",
                reused=reused,
                resumed=resumed,
                wall_s=3600 * each,
                what="",
                where="",
                protocol=protocol,
            )
            for each in hours
        ]
        asked = plan.request.model_dump(mode="json") | request
        key = f"long-{len(list_pipeline_keys(open_store(root))):012x}"
        now = time.time()
        write_pipeline(
            open_store(root),
            PipelineRecord(key=key, name="long", request=asked, started_at=now, updated_at=now, stages=tuple(stages)),
        )

    last_time(0.2, 0.4)
    for other in ({"tasks": ["other"]}, {"name": "another"}, {"protocol": "linear"}):
        last_time(0.01, **other)
    last_time(0.01, reused=True)
    assert check_deadline(root, plan).endswith("take 2.67 h at 8 images/s, the transfer 0.30 h as last time")
    last_time(0.5)
    refusal = r"2\.67 h at the 8 images/s .* and the transfer took 0\.50 h last time, .* to at most 59,200, or a larger"
    with pytest.raises(ValueError, match=refusal):
        check_deadline(root, plan)
    last_time(0.01, resumed=True)  # of one that went on from where another was cut, nothing is known
    with pytest.raises(ValueError, match=refusal):
        check_deadline(root, plan)
    both = plan_of(root, deadline_hours=4, protocol=("fewshot", "small-images"))
    known = "the transfer 0.50 h as last time (small-images 0.50 h, fewshot not known yet)"
    assert check_deadline(root, both).endswith(known), "what one protocol takes is known from nights without the other"
    last_time(0.1, plan=both, protocol="fewshot")
    last_time(0.25, plan=both, protocol="small-images")
    known = "the transfer 0.35 h as last time (fewshot 0.10 h, small-images 0.25 h)"
    assert check_deadline(root, both).endswith(known)


@pytest.mark.parametrize(
    ("night", "state", "goes_to"),
    [(True, "out_of_time", 7), (True, "finished", 7), (False, "out_of_time", 7), (False, "finished", None)],
)
def test_a_pipeline_that_is_started_again_goes_to_the_same_step_unless_a_person_starts_it_after_its_end(
    root, night, state, goes_to
):
    plan, store = plan_of(root, datetime(2026, 11, 23, 2, tzinfo=UTC) if night else None), open_store(root)
    before = PipelineRecord(
        key=plan.key, name="long", request={}, state=state, started_at=1.0, updated_at=1.0, long_run_step=7
    )
    write_pipeline(store, before)
    with open_services(Settings(root=root)) as services, exclusively(services, plan.key) as lease:
        PipelineRecorder(plan, services, lease).note()
    assert read_pipeline(store, plan.key).long_run_step == goes_to


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.timeout(900)
def test_nights_train_one_run_and_score_a_cooldown_from_where_it_stands(root, tmp_path, train_config):
    """That a run which pauses equals one that does not is tested in tests/vit/test_run.py."""
    training, nights = resolve(train_config("long"), root), plan_of(root).nights
    nights = nights.model_copy(update={"advance_images": 13 * 16, "cooldown_images": 4 * 16})
    with open_services(Settings(root=root, home=tmp_path)) as services:

        def night(step=None):
            """The rows that a night adds to its record, the run whose model is scored, and the step that the long run went to."""
            rows, said = [], {}
            recorder = SimpleNamespace(
                run_stage=lambda *row: rows.append(row), note=said.update, record=SimpleNamespace(long_run_step=step)
            )
            spec, trained = advance_long_run(nights, training, services, recorder)
            return rows, spec, trained, said["long_run_step"]

        long_run = open_store(root).child(f"runs/{training.spec().run_key}")
        ((stage, key, advanced, what),), spec, trained, step = night()
        assert (stage, advanced.reused, step, what) == ("advance", False, 13, "208 of 320 images of the long run")
        assert (read_state(long_run)["state"], read_state(long_run)["step"]) == ("paused", 13)
        assert (spec.config.parent.step, trained.state["step"]) == (13, 17)
        assert published_record(open_store(trained.state["model"]))["provenance"]["parent"] == f"{key}@13"
        rows, spec, last, step = night()
        assert (rows, spec.run_key, last.state["step"], step) == ([], key, 20, 20)
        assert [record.step for record in read_journal(long_run) if record.key == "train/loss"] == [*range(1, 21)]
        rows, _, again, _ = night(13)  # the first night once more
        assert (rows[0][2].reused, again.reused, again.state["model"]) == (True, True, trained.state["model"])
        assert night()[2].reused


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_training_that_is_out_of_time_is_cooled_down_from_where_it_stands(root, tmp_path, train_config):
    config = replace(train_config("late", steps=10**6), **{"recipe.optim.warmup_steps": 0})
    nights = plan_of(root).nights.model_copy(
        update={"advance_images": None, "cooldown_at_hours": 1.0, "cooldown_images": 4 * 16}
    )
    plan = SimpleNamespace(nights=nights, night=None)
    with open_services(Settings(root=root, home=tmp_path)) as services:

        def night(config, step=None):
            """As if it had begun an hour ago."""
            rows, said = [], {}
            record = SimpleNamespace(long_run_step=step, started_at=0.0)
            recorder = SimpleNamespace(run_stage=lambda *row: rows.append(row), note=said.update, record=record)
            return rows, said, *train_until_cooldown(plan, resolve(config, root), services, recorder)

        ((stage, key, _, what),), said, spec, trained = night(config)
        assert (stage, said["long_run_step"], what) == ("advance", 1, "16 of 16,000,000 images, then out of time")
        assert (spec.inputs["parent"], trained.state["step"]) == (f"{key}@1", 5)
        assert published_record(open_store(trained.state["model"]))["provenance"]["parent"] == f"{key}@1"
        assert night(config, step=1)[3].reused  # the pipeline was cut after its cooldown
        with pytest.raises(StageFailed, match=r"at step 1 when the time for its cooldown came .* warmup of 2 steps"):
            night(replace(config, **{"recipe.optim.warmup_steps": 2}))
