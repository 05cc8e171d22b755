"""Scripts rely on the names of commands and options: `golden/commands.py`."""

import json

from .golden import commands


def test_commands_and_options_equal_the_golden_ones():
    assert commands.found() == json.loads(commands.COMMANDS.read_text())
