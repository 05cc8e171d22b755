from datetime import UTC, datetime

import pytest

from vitline.infra.keys import RESULT_VERSIONS, run_key


def test_run_keys_of_known_inputs_are_unchanged():
    # First 12 digits of `printf '%s' JSON | sha256sum`, JSON being
    # {"config_digest":"dd","inputs":{"a":"1","b":"2"},"night":"2026-01-31T020000Z","semantics":1,"stage":"pretrain"} and
    # {"config_digest":"dd","inputs":{},"night":null,"semantics":1,"stage":"pretrain"}.
    # A change here orphans every finished run: raise an integer in RESULT_VERSIONS instead.
    night = datetime(2026, 1, 31, 2, tzinfo=UTC)
    assert run_key("vit-b16", "pretrain", "dd", {"b": "2", "a": "1"}, night) == "vit-b16-b52d27914fbd"
    assert run_key("vit-b16", "pretrain", "dd", {}) == "vit-b16-6c7d70d1f485"


def test_run_key_depends_on_everything_that_changes_results(monkeypatch):
    def key(**changes):
        given = {"name": "n", "stage": "pretrain", "config_digest": "d", "inputs": {"corpus": "c"}, "night": None}
        return run_key(**(given | changes))

    variants = [
        key(),
        key(stage="finetune"),
        key(config_digest="e"),
        key(inputs={"corpus": "x"}),
        key(inputs={"model": "c"}),
        key(night=datetime(2026, 1, 31, 2, tzinfo=UTC)),
        key(night=datetime(2026, 1, 31, 14, tzinfo=UTC)),
    ]
    monkeypatch.setitem(RESULT_VERSIONS, "pretrain", 2)
    assert len({*variants, key()}) == len(variants) + 1


@pytest.mark.parametrize("name", ["", "Vit", "a/b", "-a", "a b", "a" * 81])
def test_invalid_run_name_is_refused(name):
    with pytest.raises(ValueError, match="cannot name a run"):
        run_key(name, "pretrain", "dd", {})


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="'train' is not a stage"):
        run_key("a", "train", "dd", {})
