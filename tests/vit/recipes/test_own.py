"""User-defined recipes: what a function or a file makes, and what is refused in one sentence."""

import os
import sys

import pytest

from vitline.vit.config import ExecutionConfig
from vitline.vit.models.user_code import check_package
from vitline.vit.recipes import recipe_named

MODULE = """
from vitline.infra.config import replace
from vitline.vit.recipes import recipe_named

def mine():
    recipe, execution = recipe_named("digits").make()
    return replace(recipe, **{"optim.peak_lr": 0.25}), execution

def alone():
    return mine()[0]

def fails():
    raise KeyError("birds")

def text():
    return "vit-b16"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module `own_birds` in the current folder."""
    (tmp_path / "own_birds.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_birds", None)


def made(name):
    return recipe_named(name).make()


def test_a_function_gives_a_recipe_with_or_without_an_execution(module):
    recipe, execution = made("own_birds:mine")
    assert (recipe.optim.peak_lr, execution) == (0.25, made("digits")[1])
    assert made("own_birds:alone") == (recipe, ExecutionConfig())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own_birds:mime", "own_birds has no function 'mime'. Did you mean 'mine'?"),
        ("own_birds:fails", "failed: KeyError: 'birds'"),
        ("own_birds:text", "returned str. It must return a TrainRecipe"),
        ("own_cats:mine", "cannot be imported: ModuleNotFoundError: No module named 'own_cats'"),
        (
            "own_birds.mine",
            "There is no recipe 'own_birds.mine'. One of your own is PACKAGE.MODULE:FUNCTION, or a file",
        ),
    ],
)
def test_what_is_no_function_that_returns_a_recipe_is_refused(module, name, error):
    with pytest.raises(ValueError, match=error):
        made(name)


def test_forms_name_functions_of_listed_packages_only():
    check_package("lab.recipes:birds", ["lab"])
    with pytest.raises(
        ValueError, match=r"Python code of 'os', which forms may not import. Add .* VITLINE_RECIPE_PACKAGES"
    ):
        check_package("os:abort", ["lab"])


def test_a_file_replaces_the_network_of_its_base_by_one_of_another_kind(file):
    recipe, _ = made(
        file(
            "base: digits\nrecipe:\n  model: {architecture: own, network: 'lab.nets:Crow', image_size_px: 32}\n  seed: 3"
        )
    )
    assert (recipe.model.network, recipe.model.image_size_px, recipe.seed) == ("lab.nets:Crow", 32, 3)


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "birds.yaml").write_text(text)
        return str(tmp_path / "birds.yaml")

    return write


def test_a_file_changes_a_recipe_or_is_a_whole_one(file, tmp_path):
    base, execution = made("digits")
    text = (
        "base: digits\nrecipe: {total_steps: 7, optim: {peak_lr: 5e-4, warmup_steps: 2}}\nexecution: {num_workers: 2}\n"
    )
    recipe, changed = made(file(text))
    assert (recipe.total_steps, recipe.optim.peak_lr, recipe.model, changed.num_workers) == (7, 5e-4, base.model, 2)
    assert made(file("base: digits\n")) == (base, execution)
    assert made(f"file://{tmp_path}/birds.yaml") == (base, execution)
    whole = file(f"recipe: {base.model_dump_json()}\n")
    assert made(whole) == (base, ExecutionConfig())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- 1\n", "birds.yaml holds no mapping"),
        ("base: [digits\n", "birds.yaml .line 2. is not valid YAML: expected"),
        ("base: digit\n", "birds.yaml starts from 'digit', which is no recipe. Did you mean 'digits'?"),
        ("base: digits\nrecipe: {seed: 1}\nbase: icons\n", "line 3. is not valid YAML: the key 'base' stands twice"),
        ("base: &a [x]\nrecipe: {loss: *a}\n", r"line 2. is not valid YAML: aliases .\*name. are not supported"),
        ("base: [digits]\n", "starts from ..digits.., which is no recipe"),
        (
            "base: digits\nrecipe: {seed: 1,\n  loss: " + "[" * 100_000,
            r"birds.yaml .line 3. .* nested deeper than 20 levels",
        ),
        ("base: digits\n\nname: 2026-02-30\n", r"birds.yaml .line 3. .* looks like a timestamp and is none"),
        ("base: digits\nrecipe: {seed: 0b_}\n", r"birds.yaml .line 2. .* looks like a int and is none"),
        ("base: digits\nrecipe: {seed: !!bool maybe}\n", r"birds.yaml .line 2. .* looks like a bool and is none"),
        ("base: digits # " + "x" * 300_000, "birds.yaml has more than 262,144 bytes"),
        ("base: digits\noptim: {}\n", r"birds.yaml .line 2. has the key 'optim'"),
        ("execution: {}\n", "birds.yaml has neither `base` nor `recipe`"),
        ("base: digits\nrecipe: {optim: {peak: 1}}\n", "birds.yaml: .* has no field 'recipe.optim.peak'"),
        ("base: digits\nrecipe: {optim: {peak_lr: -1}}\n", "birds.yaml: recipe.optim.peak_lr: Input should be"),
        ("base: digits\nrecipe: {model: !!python/object/apply:os.getcwd []}\n", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(file, text, error):
    with pytest.raises(ValueError, match=error):
        made(file(text))


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"There is no recipe .*cats.yaml': no such file"):
        made(str(tmp_path / "cats.yaml"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(tmp_path, make):
    make(tmp_path / "birds.yaml")
    with pytest.raises(ValueError, match=r"There is no recipe .*birds.yaml': no such file"):
        made(str(tmp_path / "birds.yaml"))
