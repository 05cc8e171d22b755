"""Forms of preparations resolved to configs: sources of every kind, additions, and refusals."""

import pytest

from vitline.flows.forms.forms import PrepareRequest
from vitline.flows.forms.prepare_config import resolve_prepare


@pytest.fixture
def prepare(digits_root, tmp_path):
    """prepare(**fields): the config of a form with these fields; the default source is a folder with one file."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"no picture yet")

    def make(**fields):
        return resolve_prepare(digits_root, PrepareRequest(**{"source": str(tmp_path), "name": "cats"} | fields))

    return make


def test_a_source_of_any_kind_takes_its_fields_as_overrides(prepare, tmp_path):
    (tmp_path / "t.csv").write_text("image,tags\na.jpg,cat\n")
    overrides = {"source.labels_column": "tags", "recipe.val_per_class": 5, "execution.examples_per_chunk": 7}
    table = prepare(kind="table", source=str(tmp_path / "t.csv"), near_duplicates="drop", overrides=overrides)
    assert (table.source.kind, table.source.labels_column) == ("table", "tags")
    assert (table.recipe.near_duplicates, table.recipe.val_per_class) == ("drop", 5)
    assert table.execution.examples_per_chunk == 7
    assert prepare(decontaminate=("digits",)).recipe.decontaminate == ("digits",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": None}, "name is empty; a corpus made from .* needs one"),
        ({"preset": "digits"}, "Both a preset, digits, and a source, .*, were given"),
        ({"source": None}, "Neither a preset nor a source was given"),
        ({"source": None, "preset": "digits"}, "name is a field for a source of your own, but preset 'digits' was given"),
        ({"source": "/not/there"}, "The source /not/there does not exist"),
        ({"source": "memory://nothing/here"}, "memory://nothing/here holds no objects"),
        ({"kind": "arrays"}, "needs source.layout, one of cifar10, cifar100, .*--set source.layout=VALUE"),
        ({"overrides": {"source.lynks": "skip"}}, r"no field 'source\.lynks'; available fields: allowed_roots, kind, links, path"),
        ({"overrides": {"recipe.order_sed": 1}}, r"no field 'recipe\.order_sed'; available fields: .*order_seed"),
        ({"overrides": {"source.path": "/tmp"}}, "'source.path' cannot be overridden: the form's own fields determine it"),
        ({"overrides": {"recipe.class_map": "imagenet21"}}, "imagenet21k-p"),
        ({"decontaminate": ("pets",)}, "There is no corpus 'pets' below .*; available: digits"),
        ({"add_to": "digits"}, "add_to 'digits' names no version"),
        ({"add_to": "digits/0123456789ab"}, "There is no corpus 'digits/0123456789ab' below"),
    ],
)  # fmt: skip
def test_an_impossible_preparation_is_refused_in_one_sentence(prepare, fields, says):
    with pytest.raises(ValueError, match=says) as refused:
        prepare(**fields)
    assert "\n" not in str(refused.value)


def test_an_addition_has_the_name_of_its_corpus_and_must_match_it(prepare, digits):
    version = digits.uri.rpartition("/")[2]
    added = prepare(name=None, add_to=f"digits/{version}")
    assert (added.name, added.add_to) == ("digits", f"digits/{version}")
    with pytest.raises(ValueError, match=r"recipe\.order_seed: the request has 1, but .* has 0"):
        prepare(name=None, add_to=f"digits/{version}", overrides={"recipe.order_seed": 1})
