"""Every command of `vitline` with its arguments and options. `python -m tests.golden.commands` writes commands.json again."""

import json
from enum import EnumType
from inspect import formatannotation
from pathlib import Path
from typing import get_args

from vitline.flows.cli.main import all_commands

COMMANDS = Path(__file__).with_name("commands.json")


def main() -> None:
    COMMANDS.write_text(json.dumps(found(), indent=1, sort_keys=True) + "\n")


def found() -> dict[str, list[str]]:
    return dict(commands(all_commands(), "vitline"))


def commands(command, name):
    """(name, its parameters) of a command and of all below it."""
    yield name, sorted(parameter(each) for each in command.params if each.name != "help")
    for sub, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {sub}")


def parameter(each) -> str:
    """`--split <str>, default train`, `key <str>, required`: what a caller may rely on, without prose."""
    names = "/".join([*each.opts, *each.secondary_opts])
    kind = each.type_descriptor.annotation
    choices = [item for item in get_args(kind) if isinstance(item, EnumType)]
    facts = [f"{names} <{f'list of {[*map(str, choices[0])]}' if choices else formatannotation(kind)}>"]
    if each.required:
        facts.append("required")
    elif isinstance(each.default, str | int | float):
        facts.append(f"default {each.default}")
    return ", ".join(facts)


if __name__ == "__main__":
    main()
