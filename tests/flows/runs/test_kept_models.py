"""Evaluations that keep models: what is refused where the weights are gone, and which repetition has them again."""

from types import SimpleNamespace

import pytest

from vitline.flows.catalog.lists import list_models
from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.flows.plans.evaluation_spec import evaluation_spec
from vitline.flows.runs import evaluate_tasks as running
from vitline.flows.runs.evaluate_tasks import evaluate_tasks
from vitline.flows.runs.services import Observer
from vitline.flows.runs.stage import StageFailed, StageResult
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import next_trials, plan_task_sweeps
from vitline.vit.evaluation.run_trial import ensure_trial

from ...vit.unleased import Unleased

SHORT = {"protocol.total_steps": [2], "protocol.warmup_steps": 1, "protocol.learning_rates": [0.1]}


@pytest.fixture
def plan(root, digits, tiny):
    """plan(**fields): that of an evaluation of the digits in two steps."""
    request = {"model": tiny, "tasks": (digits.uri,), "overrides": SHORT}
    return lambda **fields: resolve_evaluate(root, EvaluateRequest(**request, **fields))[0]


@pytest.fixture
def score(root):
    """score(spec): runs and records what is missing, in this process; the scores."""

    def go(spec):
        store, scores = open_store(root), []
        trials = store.child("trials")
        for task_sweep in plan_task_sweeps(spec):
            for trial in next_trials(task_sweep, trials)[0]:
                ensure_trial(Unleased(trials, 1), trials, trial)
            scores.append(next_trials(task_sweep, trials)[1].stored_first(store, task_sweep.score_key))
        return scores

    return go


def test_scores_without_weights_are_refused_until_they_are_scored_again(root, plan, score):
    first = evaluation_spec("scores", plan(), root)
    assert evaluation_spec("scores", plan(keep_models=True), root).run_key == first.run_key
    score(first)
    with pytest.raises(
        ValueError, match=r"There are no weights to keep of digits: they were scored without keep_models.*`--rescore`"
    ):
        evaluation_spec("scores", plan(keep_models=True), root)
    again = evaluation_spec("scores", plan(keep_models=True, rescore=True), root)
    assert again.repetition == 1
    score(again)
    assert len({key.split("/")[2] for key in open_store(root).list("models/tiny-digits/")}) == 1
    score(evaluation_spec("scores", plan(rescore=True), root))  # repetition 2, without weights
    assert evaluation_spec("scores", plan(keep_models=True, rescore=True), root).repetition == 3


def test_a_request_is_reused_as_long_as_its_models_are_there(root, plan, score, monkeypatch):
    kept, said = evaluation_spec("scores", plan(keep_models=True, num_seeds=2), root), []
    services = SimpleNamespace(root=root, observer=SimpleNamespace(say=said.append))

    def stage(services, spec, *_, **__):
        return StageResult({"scores": [one.model_dump(mode="json") for one in score(spec)]}, True, 0.0)

    monkeypatch.setattr(running, "run_stage", stage)
    for _ in range(2):
        spec, _, scores = evaluate_tasks("scores", plan(keep_models=True, num_seeds=2), services)
        assert (spec, len(scores)) == (kept, 2)
    names = [f"tiny-digits/{one.trials[-1][-12:]}" for one in scores]
    assert {row["run"] for row in list_models(root) if row["name"] == "tiny-digits"} == {
        one.trials[-1] for one in scores
    }
    assert said == [f"models kept: {', '.join(names)}"] * 2
    open_store(root).delete(f"models/{names[0]}/config.json")
    with pytest.raises(ValueError, match="or the kept models were deleted"):
        evaluate_tasks("scores", plan(keep_models=True, num_seeds=2), services)


def test_an_attempt_that_keeps_nothing_and_was_followed_is_no_success(root, plan, score, monkeypatch):
    def stage(services, spec, *_, **__):
        return StageResult({"scores": score(replace(spec, keep_models=False))}, False, 1.0)

    monkeypatch.setattr(running, "run_stage", stage)
    with pytest.raises(StageFailed, match="There are no weights to keep of digits"):
        evaluate_tasks("scores", plan(keep_models=True), SimpleNamespace(root=root, observer=Observer()))
