"""The page of all commands."""

import inspect
from enum import EnumType
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitline.flows.cli.main import all_commands

from .markdown import joined, table, text
from .types_in_words import choices_text


def commands_page() -> str:
    command = all_commands()
    parts = [
        "# Commands",
        "`vitline --help` shows the same in a terminal. Every command takes `--help`. Exit codes: 0 done, 1 failed, 2 wrong "
        "usage or invalid configuration, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.",
        options_table(command),
    ]
    alone = [(name, sub) for name, sub in command.commands.items() if not hasattr(sub, "commands")]
    parts += [line for name, sub in alone for line in command_lines(f"vitline {name}", sub)]
    for name, group in command.commands.items():
        if hasattr(group, "commands"):
            parts += [f"## vitline {name}", text(group.help or ""), *group_lines(f"vitline {name}", group)]
    return joined(parts)


def group_lines(path: str, group: Any) -> list[str]:
    """The sections of the commands of a group, those of its groups included."""
    lines = []
    for name, command in group.commands.items():
        lines += (group_lines if hasattr(command, "commands") else command_lines)(f"{path} {name}", command)
    return lines


def command_lines(path: str, command: Any) -> list[str]:
    """The section of one command: usage, help, arguments, options, example."""
    help_text, *examples = inspect.cleandoc(command.help or "").split("Example: ")
    types = types_of(command)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *(argument_usage(p) for p in arguments), "[OPTIONS]"])
    lines = [f"{'###' if path.count(' ') > 1 else '##'} {path}", f"```text\n{usage}\n```", text(help_text)]
    if arguments:
        rows = [[f"`{p.name.upper()}`", kind_text(types[p.name]), text(p.help or "")] for p in arguments]
        lines.append(table(["argument", "type", "what it is"], rows))
    lines.append(options_table(command))
    if examples:
        shown = "\n".join(example.strip().strip("`") for example in examples)
        lines += ["Examples:" if examples[1:] else "Example:", f"```sh\n{shown}\n```"]
    return lines


def types_of(command: Any) -> dict[str, Any]:
    """The types of the parameters of a command's function."""
    return get_type_hints(inspect.unwrap(command.callback))


def argument_usage(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def options_table(command: Any) -> str:
    types = types_of(command)
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    return table(["option", "type", "what it does"], [option_row(p, types[p.name]) for p in options])


def option_row(parameter: Any, kind: Any) -> list[str]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    help_text = parameter.help or ""
    notes = [
        text(help_text),
        "Required." if parameter.required else "",
        f"Default: `{default_of(parameter)}`." if shows_default(parameter) else "",
        "Repeatable." if parameter.multiple and "epeatable" not in help_text else "",
    ]
    shown = f"`{parameter.metavar}`" if parameter.metavar else kind_text(kind)
    return [names, shown, " ".join(filter(None, notes))]


def shows_default(parameter: Any) -> bool:
    """Whether the default is a value worth printing, and not in the help text already."""
    default = default_of(parameter)
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return plain and not parameter.required and f"{default}" not in (parameter.help or "")


def default_of(parameter: Any) -> Any:
    """The default; of a list of one its item."""
    default = parameter.default
    return default[0] if isinstance(default, list) and len(default) == 1 else default


KINDS = {str: "`TEXT`", int: "`INTEGER`", float: "`NUMBER`", Path: "`PATH`", bool: "flag"}


def kind_text(kind: Any) -> str:
    """What is typed for a parameter: `TEXT`, `INTEGER`, one of the choices; a flag takes nothing."""
    if get_origin(kind) is Literal:
        return choices_text(kind)
    if isinstance(kind, EnumType):
        return choices_text(Literal[*map(str, kind)])
    if get_args(kind):  # a list, or an optional value
        return kind_text(get_args(kind)[0])
    return KINDS[kind]
