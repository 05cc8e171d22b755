"""The console command `vitline`. Modules are imported when they are needed, so that `--help` answers at once."""

import contextlib
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings
from vitline.flows.cli.groups import stack

GROUPS = {
    "data": "Corpora: prepare, show, verify, compare, make subsets.",
    "pretrain": "Pre-training: run, plan, branch.",
    "finetune": "Fine-tune a published model on a whole corpus.",
    "evaluate": "Evaluate models on VTAB and other tasks; report the scores.",
    "vtab": "VTAB and other benchmarks: list the official files, prepare the tasks, export their splits.",
    "plan": "Plans of machines: how many nodes to train on.",
    "runs": "Runs: list, show, compare, send to MLflow.",
    "nights": "Scheduled nights: their verdicts.",
    "flows": "Flows in Prefect: register, list, start.",
    "model": "Models: published ones and weights of other codebases; convert, run, inspect, benchmark.",
    "stack": "The local stack: S3 store, MLflow, Prefect with a worker, one-node Ray.",
    "ops": "Operations: check this machine and its services, reconcile, collect garbage, preempt.",
}
"""The groups of commands, each a file in `groups`, with their help."""


class LazyGroups(TyperGroup):
    """Imports a group only to run one of its commands: forms and their options take longer to load than a list of groups to print."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, group_named(name) if name in GROUPS else command, rest


def group_named(name: str) -> TyperGroup:
    """A group with its commands and their options."""
    app: typer.Typer = importlib.import_module(f"vitline.flows.cli.groups.{name}").app
    app.info.help = GROUPS[name]
    return typer.main.get_group(app)


def all_commands() -> TyperGroup:
    """`vitline` with every group loaded, for documentation and tests."""
    found: TyperGroup = typer.main.get_group(app)
    found.commands.update({name: group_named(name) for name in GROUPS})
    return found


app = typer.Typer(
    name="vitline",
    cls=LazyGroups,
    help="Pre-train Vision Transformers on labelled images, transfer them, compare the scores.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in GROUPS.items():
    app.add_typer(typer.Typer(), name=_name, help=_help)


def print_version(requested: bool) -> None:
    """Print the version and, where the code is a git checkout, the commit; then exit."""
    if not requested:
        return
    from importlib.metadata import version

    from vitline.infra.provenance import checkout_commit

    commit = checkout_commit(Path(__file__).resolve().parents[2])
    typer.echo(f"vitline {version('vitline')}" + (f" (commit {commit[:7]})" if commit else ""))
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that need no command."""


@app.command()
def demo(
    profile: Annotated[
        Literal["full", "smoke"], typer.Option(help="`smoke`: a few steps, to test an installation.")
    ] = "full",
    seed: Annotated[int, typer.Option(help="Random seed for initialisation, data order and augmentation.")] = 0,
    json: Json = False,
) -> None:
    """Prepare, pre-train, fine-tune, evaluate and compare on real images, on this machine.

    Example: `vitline demo`
    """
    from vitline.flows.cli.demo import preamble, run_demo
    from vitline.infra.local.running_stack import find_running_stack

    chosen = settings(None)
    preamble(chosen, profile)
    if chosen.prefect_api_url is None or find_running_stack(chosen):
        chosen = stack.start_and_join(chosen)
    run_demo(chosen, profile=profile, seed=seed, as_json=json)


@app.command()
def train_folder(
    source: Annotated[Path, typer.Option(help="Folder with one sub-folder per class.")],
    name: Annotated[str, typer.Option(help="Name of the corpus and of the model: lower case, digits, dashes.")],
    root: Root = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; default: chosen from the number of images.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking.")] = False,
    json: Json = False,
) -> None:
    """Prepare a folder of images, pre-train a network of a size that suits their number, evaluate it on held-out images.

    Example: `vitline train-folder --source ~/pictures/birds --name birds`
    """
    from vitline.flows.cli.train_folder import train_folder

    train_folder(settings(root), source, name, steps=steps, confirm=not yes, as_json=json)


def problem_and_option(problem: Mapping[str, Any]) -> str:
    """A validation error of a config as a sentence: field, expectation, value, and how to change it."""
    from vitline.flows.forms import refusals

    where, text = refusals.settable_path(problem["loc"]), refusals.problem_text(problem)
    if where.startswith(("source.", "recipe", "execution")) or (len(problem["loc"]) > 1 and where == "source"):
        rule_between_fields = isinstance(problem.get("input"), Mapping)
        # An element of a list cannot be set by itself.
        whole = refusals.settable_path([*itertools.takewhile(lambda part: isinstance(part, str), problem["loc"])])
        text += f". `--set {f'{where}.FIELD' if rule_between_fields else whole}=VALUE` changes it"
    return f"{text}."


@contextlib.contextmanager
def prefect_errors() -> Iterator[None]:
    """Errors of Prefect's client become sentences."""
    try:
        yield
    except Exception as error:
        if "prefect" in sys.modules:
            from vitline.flows.ops.prefect_errors import sentence_of

            if sentence := sentence_of(error):
                raise RuntimeError(sentence) from error
        raise


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM, and the SIGHUP of a closed terminal, stop a command as Ctrl-C does. Yields which one came first. What is ignored, as
    by nohup, stays ignored."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = [n for n, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    terminals = [output for output in (1, 2) if os.isatty(output)]

    def stop(number: int, frame: FrameType | None) -> None:
        for each in {*handled} - {signal.SIGINT}:
            signal.signal(each, signal.SIG_IGN)  # a second one must not end what saves a checkpoint
        came.append(number)
        if number == signal.SIGHUP:  # writing to a terminal that is gone fails
            for output in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        raise KeyboardInterrupt("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    for number in handled:
        signal.signal(number, stop)
    try:
        yield came
    finally:
        for number in handled:
            signal.signal(number, before[number])


def main() -> None:
    """Entry point: exit codes 0 ok, 1 failed, 2 usage or invalid config, 130 after Ctrl-C, 143 and 129 after SIGTERM and SIGHUP."""
    came: list[int] = []
    try:
        with signals_as_ctrl_c() as came, prefect_errors():
            stack.join_stack(sys.argv[1:])
            app()
    except SystemExit as end:
        if end.code == 130:  # typer turns Ctrl-C into this
            console.say("stopped; the same command resumes from the finished checkpoints, examined parts and shards")
            sys.exit(128 + came[0] if came else 130)
        raise
    except ValueError as error:
        from pydantic import ValidationError

        problems = (
            [problem_and_option(p) for p in error.errors()] if isinstance(error, ValidationError) else [str(error)]
        )
        for problem in problems:
            console.say(f"error: {problem}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        console.say(f"error: this command needs the package {error.name}: `pip install 'vitline[train,flows]'`.")
        sys.exit(1)
    except (RuntimeError, OSError) as error:
        from vitline.flows.runs.stage import Skipped

        console.say(f"{'skipped' if isinstance(error, Skipped) else 'error'}: {error}")
        sys.exit(0 if isinstance(error, Skipped) else 1)


if __name__ == "__main__":
    main()
