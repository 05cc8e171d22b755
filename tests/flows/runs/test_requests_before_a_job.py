"""How often the store is asked before a job exists: each request takes tens of milliseconds at a distance."""

from collections import Counter
from types import SimpleNamespace

import pytest

from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.forms import BranchRequest, FinetuneRequest, PipelineRequest, PretrainRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.training_config import resolve_branch, resolve_pretrain
from vitline.flows.runs import pretrain
from vitline.flows.runs.end_to_end import existing_corpus, pretrain_stage
from vitline.flows.runs.services import Observer
from vitline.infra.stores.file_store import FileStore

REQUESTS = ("read", "read_tagged", "list", "scan", "size", "create", "compare_and_swap", "write", "delete", "writer")
SMALL = {
    "recipe.total_steps": 4,
    "recipe.optim.warmup_steps": 1,
    "recipe.input.global_batch_size": 8,
    "recipe.input.num_lanes": 1,
    "execution.num_workers": 1,
}


class Submitted(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """The requests to the store, one within another counted once."""
    found, within = [], []

    def counted(name, method):
        def request(self, *args, **options):
            if not within:
                found.append((name, f"{self.uri}/{args[0] if args else ''}"))
            within.append(name)
            try:
                return method(self, *args, **options)
            finally:
                within.pop()

        return request

    for name in REQUESTS:
        monkeypatch.setattr(FileStore, name, counted(name, getattr(FileStore, name)))
    return found


@pytest.fixture
def services(monkeypatch):
    """services(root): those with which a training ends as Submitted where it would submit a job."""

    def submitted(*_, **__):
        raise Submitted

    monkeypatch.setattr(pretrain, "run_stage", submitted)
    return lambda root: SimpleNamespace(root=root, observer=Observer())


def asked_again(asked):
    """What was asked for more than once, but for the manifest that the statistics of a corpus are read with."""
    return [what for what, times in Counter(asked).items() if times > 1 + what[1].endswith("/manifest.json")]


def test_a_form_becomes_a_job_with_few_requests_whatever_else_the_root_holds(two_corpora, services, asked):
    request = PretrainRequest(corpus="birds", recipe="digits", overrides=SMALL)
    with pytest.raises(Submitted):
        pretrain.train_model(resolve_pretrain(two_corpora, request), services(two_corpora))
    assert len(asked) <= 6, asked
    assert not asked_again(asked)
    assert not [request for request in asked if "city" in str(request)]


def test_a_corpus_that_is_trained_and_probed_on_is_read_once(two_corpora, services, asked):
    probes = {"execution.probes.every_steps": 2, "execution.probes.corpora": ["birds"]}
    request = PretrainRequest(corpus="birds", recipe="digits", overrides=SMALL | probes)
    with pytest.raises(Submitted):
        pretrain.train_model(resolve_pretrain(two_corpora, request), services(two_corpora))
    assert len(asked) <= 6, asked


def test_a_mixture_reads_each_corpus_once_and_the_root_for_leakage(two_corpora, services, asked):
    request = {"corpus": "birds", "mix_with": [{"corpus": "city"}], "recipe": "digits", "overrides": SMALL}
    training = resolve_pretrain(two_corpora, PretrainRequest.model_validate(request))
    assert len(asked) <= 6, asked
    with pytest.raises(Submitted):
        pretrain.train_model(training, services(two_corpora))
    assert len(asked) <= 13, asked
    assert not asked_again(asked)


def test_a_branch_reads_its_parent_once(root, begin_run, services, asked):
    run, key, _ = begin_run(root, "birds")
    run.write_json("checkpoints/step-000000010-a1/manifest.json", {})
    asked.clear()
    with pytest.raises(Submitted):
        pretrain.train_model(resolve_branch(root, BranchRequest(parent=key, step=10)), services(root))
    assert len(asked) <= 13, asked
    assert not [what for what in asked_again(asked) if what[0] == "read"]


def test_a_fine_tuning_reads_its_model_once(digits_root, tiny, services, asked):
    asked.clear()
    training = resolve_finetune(digits_root, FinetuneRequest(model=tiny, corpus="digits", global_batch_size=8))
    with pytest.raises(Submitted):
        pretrain.train_model(training, services(digits_root))
    assert len(asked) <= 9, asked
    assert not asked_again(asked)


def test_a_pipeline_reads_each_corpus_once_for_its_plan_and_none_for_its_training(two_corpora, services, asked):
    request = {"corpus": "birds", "mix_with": [{"corpus": "city"}], "tasks": ["city"], "recipe": "digits"}
    plan = resolve_pipeline(two_corpora, PipelineRequest.model_validate(request | {"overrides": SMALL}))
    assert len(asked) <= 6, asked
    assert not asked_again(asked)
    corpora = [existing_corpus(uri) for uri in plan.sources]
    asked.clear()
    with pytest.raises(Submitted):
        pretrain_stage(plan, 0, corpora, services(two_corpora), recorder=None)
    assert len(asked) <= 9, asked
    assert not asked_again(asked)
