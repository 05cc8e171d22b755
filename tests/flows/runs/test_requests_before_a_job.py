"""How often the store is asked before a job exists: each request takes tens of milliseconds at a distance."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from vitline.flows.forms.forms import PretrainRequest
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.runs import pretrain
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
                found.append((name, *args[:1]))
            within.append(name)
            try:
                return method(self, *args, **options)
            finally:
                within.pop()

        return request

    for name in REQUESTS:
        monkeypatch.setattr(FileStore, name, counted(name, getattr(FileStore, name)))
    return found


def test_a_form_becomes_a_job_with_few_requests_whatever_else_the_root_holds(two_corpora, asked, monkeypatch):
    def submitted(*_, **__):
        raise Submitted

    monkeypatch.setattr(pretrain, "run_stage", submitted)
    nobody = SimpleNamespace(say=lambda text: None, planned=lambda key, rows: None)
    with suppress(Submitted):
        config = resolve_pretrain(two_corpora, PretrainRequest(corpus="birds", recipe="digits", overrides=SMALL))
        pretrain.train_model(config, SimpleNamespace(root=two_corpora, observer=nobody))
    assert len(asked) <= 10, asked
    assert not [request for request in asked if "city" in str(request)]
