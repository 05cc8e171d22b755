"""How a pipeline ends its night: the verdict is written first, under its lease, and changes nothing in how it ends."""

from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from statistics import fmean
from types import SimpleNamespace

import pytest

from vitline.flows.catalog.records import read_pipeline
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.nights.from_records import judge_again, scores_of
from vitline.flows.nights.night_record import THE_GATE, read_champion, read_night
from vitline.flows.runs import end_to_end
from vitline.flows.runs.end_to_end import PipelineRecorder
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import StageFailed, StageResult, exclusively
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import Score

from .simulated import Nights, store_night

NIGHT = datetime(2026, 11, 23, 2, tzinfo=UTC)


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def recorder(root, store):
    """recorder(): that of a night with scores, as its pipeline has it before the end."""
    with ExitStack() as contexts:
        services = contexts.enter_context(open_services(Settings(root=root)))

        def begin():
            request = PipelineRequest(name="nightly", corpus="digits-0-to-4", recipe="digits", tasks=("digits-5-to-9",))
            plan = resolve_pipeline(root, request, NIGHT)
            stages = store_night(store, replace(Nights(0).night(), key=plan.key, night=NIGHT)).stages
            begun = PipelineRecorder(plan, services, contexts.enter_context(exclusively(services, plan.key)))
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


def test_a_night_of_several_seeds_trains_and_evaluates_each_and_records_means(root, store, digits, monkeypatch):
    """Training and evaluation are replaced; tests/end_to_end has them."""
    scores = Nights(0).night(num_seeds=3)
    record = store_night(store, replace(scores, key="made"), name="other")
    trained = [stage.run_key for stage in record.stages if stage.stage == "pretrain"]
    evaluated = [stage.run_key for stage in record.stages if stage.stage == "evaluate"]
    seeds = []

    def train_model(training, services, night):
        nth = training.config.recipe.seed - 5
        seeds.append((training.config.recipe.seed, night))
        state = {
            "images_seen": 16,
            "step": 1,
            "val_top1": 0.5 + 0.1 * nth,
            "model": f"{root}/models/{scores.models[nth]}",
        }
        return SimpleNamespace(run_key=trained[nth]), StageResult(state, False, 1.0)

    def evaluate_tasks(name, plan, services):
        nth = plan.seed - 5
        assert plan.models == (f"{root}/models/{scores.models[nth]}",)
        found = store.read_json(f"runs/{evaluated[nth]}/state.json")["scores"]
        return (
            SimpleNamespace(run_key=evaluated[nth]),
            StageResult({}, False, 1.0),
            [Score.model_validate(s) for s in found],
        )

    monkeypatch.setattr(end_to_end, "train_model", train_model)
    monkeypatch.setattr(end_to_end, "evaluate_tasks", evaluate_tasks)
    monkeypatch.setattr(end_to_end, "published_record", lambda store: {"digest": store.uri.rpartition("/")[2]})
    monkeypatch.setattr(end_to_end, "write_report", lambda *_: "report")
    request = PipelineRequest(
        name="nightly", corpus=digits.uri, recipe="digits", tasks=(digits.uri,), seed=5, from_scratch=False,
        overrides={"nights.num_seeds": 3},
    )  # fmt: skip
    with open_services(Settings(root=root)) as services:
        done = end_to_end.pretrain_then_transfer(resolve_pipeline(root, request, NIGHT), services)
    assert seeds == [(5, NIGHT), (6, NIGHT), (7, NIGHT)]
    assert [stage.stage for stage in done.record.stages] == ["prepare", *3 * ["pretrain", "evaluate"]]
    assert done.record.model_digest == scores.models[0]
    assert done.record.metrics["val/top1"] == pytest.approx(0.6)
    expected = {name: fmean(score.value for score in of) for name, of in scores.tasks.items()}
    assert {name: done.record.metrics[name] for name in expected} == pytest.approx(expected)
    assert scores_of(store, done.record, predictions=False).models == scores.models
    assert done.night.sentence == "Not compared: there is neither a champion nor an earlier whole night."
    champion = read_champion(store, "nightly")
    assert (champion.pipeline, champion.by) == (done.record.key, THE_GATE)


def test_a_night_leaves_out_what_could_not_change_its_verdict_until_a_person_asks_for_it(
    root, store, digits, monkeypatch, capsys
):
    """Evaluations and the report are replaced; tests/benchmarks/early_nights.py has them."""
    tasks = [SimpleNamespace(uri=f"{root}/corpora/t{i}", manifest=SimpleNamespace(name=f"t{i}")) for i in range(6)]
    nights = Nights(0, num_images={f"tasks/{task.manifest.name}/top1": 300 for task in tasks})
    for _ in range(10):
        record = store_night(store, nights.night(num_seeds=1))
    scores, night = store_night(store, nights.night(num_seeds=1), name="other"), record.night + timedelta(1)
    key = next(stage.run_key for stage in scores.stages if stage.stage == "evaluate")
    every = [Score.model_validate(score) for score in store.read_json(f"runs/{key}/state.json")["scores"]]
    evaluated = []

    def evaluate_tasks(name, plan, services):
        evaluated.append([task.name for task in plan.tasks])
        found = [score for score in every if score.task in evaluated[-1]]
        part = f"evaluation-{len(found)}"
        store.write_json(f"runs/{part}/state.json", {"scores": [score.model_dump(mode="json") for score in found]})
        return SimpleNamespace(run_key=part), StageResult({}, False, 1.0), found

    monkeypatch.setattr(end_to_end, "evaluate_tasks", evaluate_tasks)
    monkeypatch.setattr(end_to_end, "write_report", lambda *_: "report")
    asked = {"name": "nightly", "corpus": digits.uri, "recipe": "digits", "tasks": (digits.uri,)}

    def run(**overrides):
        request = PipelineRequest(**asked, overrides={"nights.promote": False} | overrides)
        plan = resolve_pipeline(root, request, night)
        with ExitStack() as contexts:
            services = contexts.enter_context(open_services(Settings(root=root)))
            lease = contexts.enter_context(exclusively(services, plan.key))
            recorder = contexts.enter_context(PipelineRecorder(plan, services, lease))
            end_to_end.Transfer(plan, [digits, *tasks], services, recorder).evaluate("models/m", 0)
            recorder.end("finished")
        return recorder

    early = run()
    assert 0 < early.record.look.num_tasks < 6
    assert [len(names) for names in evaluated] == [early.record.look.num_tasks]
    assert (
        "the evaluation ends as soon as the verdict is certain; it looks after 3 of 6 tasks" in capsys.readouterr().err
    )
    refused = f"The champion stays: this night has scores on {early.record.look.scored}."
    assert early.night.gate.reason == refused
    assert early.night.sentence.endswith(f"Decided after {early.record.look.scored}.")
    assert judge_again(store, early.night) == early.night.verdict
    whole = run(**{"nights.early_verdict": False})
    assert whole.record.key == early.record.key
    assert (evaluated[-1], whole.record.look) == ([f"t{i}" for i in range(6)], None)
    store.write("champions/nightly.json", b"damaged")
    assert run().record.look is None
    assert "could not be found out, so the evaluation goes on: " in capsys.readouterr().err
    assert "Decided after" not in read_night(store, "nightly", night).sentence


def test_a_failed_protocol_hides_no_scores_of_the_others(root, store, digits, monkeypatch):
    """Evaluations and the report are replaced; tests/flows/runs/test_several_protocols.py has them."""
    record = store_night(store, Nights(0).night(num_seeds=1), name="other")
    key = next(stage.run_key for stage in record.stages if stage.stage == "evaluate")
    scores = [Score.model_validate(score) for score in store.read_json(f"runs/{key}/state.json")["scores"]]

    def evaluate_tasks(name, plan, services):
        if plan.protocol.name == "small-images":
            raise StageFailed("there was no room.")
        probed = [score.model_copy(update={"protocol": plan.protocol.name}) for score in scores]
        return SimpleNamespace(run_key=key), StageResult({}, False, 1.0), probed

    monkeypatch.setattr(end_to_end, "evaluate_tasks", evaluate_tasks)
    monkeypatch.setattr(end_to_end, "write_report", lambda *_: "report")
    asked = {"name": "nightly", "corpus": digits.uri, "recipe": "digits", "tasks": (digits.uri,)}
    plan = resolve_pipeline(root, PipelineRequest(protocol=("small-images", "linear"), **asked), NIGHT)
    failed = "The scores of linear are recorded. The evaluation with small-images failed: there was no room."
    with open_services(Settings(root=root)) as services, exclusively(services, plan.key) as lease:
        recorder = PipelineRecorder(plan, services, lease)
        with pytest.raises(StageFailed, match=failed), recorder:
            end_to_end.Transfer(plan, [], services, recorder).evaluate("models/m", 0)
    ended = read_pipeline(store, plan.key)
    assert (ended.state, ended.reason, ended.report) == ("failed", failed, "report")
    assert ended.metrics.keys() == {f"linear/{task}/{name}" for task in ("digits", "emoji") for name in ("top1", "ece")}
    assert recorder.night.sentence == f"Broken: the night failed in its evaluation with small-images. {failed}"


def test_of_two_protocols_that_fine_tune_the_one_of_the_verdict_has_the_plain_names(root, store, digits):
    record = store_night(store, Nights(0).night(num_seeds=1), name="other")
    key = next(stage.run_key for stage in record.stages if stage.stage == "evaluate")
    scores = [Score.model_validate(score) for score in store.read_json(f"runs/{key}/state.json")["scores"]]
    asked = {
        "corpus": digits.uri,
        "recipe": "digits",
        "tasks": (digits.uri,),
        "protocol": ("small-images", "vit-paper"),
    }
    plan = resolve_pipeline(root, PipelineRequest(**asked))
    names = [[*end_to_end.pipeline_metrics(plan, protocol, scores)] for protocol in asked["protocol"]]
    assert names[1] == ["tasks/digits/top1", "tasks/digits/ece", "tasks/emoji/top1", "tasks/emoji/ece"]
    assert names[0] == [f"small-images/{name}" for name in names[1]]
