"""Modules, functions and files that strings name: a move of a file would break them without an import that fails."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")
_MODULE = re.compile(rf"\bvitline\.(?:{'|'.join(ROOMS)})(?:\.\w+)+")
_FILE = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]+\.(?:j2|json|py|toml|css)")


def strings():
    """(where, text) of every string of the product but docstrings, f-strings in pieces."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


STRINGS = list(strings())
MODULES = [(where, found.rstrip(".")) for where, text in STRINGS for found in _MODULE.findall(text)]
FILES = [(where, text) for where, text in STRINGS if _FILE.fullmatch(text)]


def names_of(module):
    """What a module defines; not by importing it, which may load torch."""
    return {name for node in ast.parse(module.read_bytes()).body if (name := getattr(node, "name", None))}


def test_there_are_such_strings():
    assert len(MODULES) > 10
    assert len(FILES) > 5


@pytest.mark.parametrize(("where", "name"), MODULES)
def test_a_module_or_function_that_a_string_names_exists(where, name):
    *parents, last = name.split(".")[1:]
    path = ROOT.joinpath(*parents)
    found = (path / last).is_dir() or (path / f"{last}.py").exists()
    if not found and (module := path.with_suffix(".py")).exists():
        found = last in names_of(module)
    assert found, f"{where} names {name}"


@pytest.mark.parametrize(("where", "name"), FILES)
def test_a_file_that_a_string_names_exists(where, name):
    assert (ROOT / name).exists(), f"{where} names {name}"
