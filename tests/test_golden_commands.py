"""Scripts rely on the names of commands and options: `golden/commands.py`."""

import json

import pytest

from .golden import commands


def test_commands_and_options_equal_the_golden_ones():
    pytest.importorskip("typer", minversion="0.29")  # earlier ones do not show the annotations of options
    assert commands.found() == json.loads(commands.COMMANDS.read_text())
