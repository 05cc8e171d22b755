"""The console command `vitline`. Modules are imported when they are needed, so that `--help` answers at once."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows import console
from flows.commands import chaos_commands, data_commands, model_commands, stack_commands, vtab_commands
from flows.commands.command_line import ClassMap, Json, Root, Set, cell, settings, show_one, show_rows

app = typer.Typer(
    name="vitline",
    help="Pre-train Vision Transformers on labelled images, transfer them, compare the scores.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(requested: bool) -> None:
    """Print the version and, where the code is a git checkout, the commit; then exit."""
    if not requested:
        return
    from importlib.metadata import version

    from infra.provenance import checkout_commit

    commit = checkout_commit(Path(__file__).resolve().parents[1])
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


def group(name: str, text: str) -> typer.Typer:
    sub = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(sub, name=name)
    return sub


app.add_typer(data_commands.app, name="data")
pretrain_app = group("pretrain", "Pre-training: plan and run.")
finetune_app = group("finetune", "Fine-tune a published model on a whole corpus.")
app.add_typer(vtab_commands.app, name="vtab")
runs = group("runs", "Runs: list, show, compare.")
nights = group("nights", "Nights: their verdicts.")
flows_app = group("flows", "Flows in Prefect: register, list, start.")
app.add_typer(model_commands.app, name="model")
app.add_typer(stack_commands.app, name="stack")
ops = group(
    "ops", "Operations: check this machine and its services, reconcile, collect garbage, preempt, inject faults."
)
ops.add_typer(chaos_commands.app, name="chaos")


@app.command()
def demo(
    profile: Annotated[
        Literal["full", "smoke"], typer.Option(help="`smoke`: a few steps, to test an installation.")
    ] = "full",
    seed: Annotated[int, typer.Option(help="Seed of initialisation, order and augmentation.")] = 0,
    json: Json = False,
) -> None:
    """Prepare, pre-train, fine-tune, evaluate and compare on real images, on this machine.

    Example: `vitline demo`
    """
    from flows.commands.demo import preamble, run_demo

    chosen = settings(None)
    preamble(chosen, profile)
    if chosen.prefect_api_url is None:
        chosen = stack_commands.start_and_join(chosen)
    run_demo(chosen, profile=profile, seed=seed, as_json=json)


@app.command()
def run(
    source: Annotated[Path, typer.Option(help="Folder with one sub-folder per class.")],
    name: Annotated[str, typer.Option(help="Name of the corpus and of the model: lower case, digits, dashes.")],
    root: Root = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; default: chosen from the number of pictures.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking.")] = False,
    json: Json = False,
) -> None:
    """Prepare a folder of your own pictures, pre-train a network that suits their number, evaluate it on held-out ones.

    Example: `vitline run --source ~/pictures/birds --name birds`
    """
    from flows.commands.own_pictures import run_own_pictures

    run_own_pictures(settings(root), source, name, steps=steps, confirm=not yes, as_json=json)


Series = Annotated[
    str | None, typer.Option("--name", help="Name in the request of the nights, where there are several series.")
]
Corpora = Annotated[
    list[str],
    typer.Option(
        help="Corpus to train on: NAME, NAME/VERSION or URI. Repeat it for a mixture, with weights: `--corpus birds --corpus "
        "city=0.5`; a weight that is not given is 1."
    ),
]


InitFrom = Annotated[
    str | None,
    typer.Option(
        help="Weights to start from: a published model (NAME, NAME/VERSION, NAME@ALIAS, URI), the key of a finished run, a .npz file, "
        "or a folder of timm or Hugging Face. The head is new where the classes differ."
    ),
]


@pretrain_app.command("plan")
def pretrain_plan(
    corpus: Corpora,
    recipe: Annotated[str, typer.Option(help="Recipe; `vitline pretrain recipes` lists them.")],
    class_map: ClassMap = None,
    init_from: InitFrom = None,
    set_: Set = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show what a pre-training would cost, without starting it.

    Example: `vitline pretrain plan --corpus birds --recipe vit-s16-i21k --set execution.num_workers=8`
    """
    from flows.commands.training import requested_training
    from flows.requests.training_cost import training_plan

    show_one(
        training_plan(requested_training(settings(root).root, corpus, recipe, set_ or [], class_map, init_from)), json
    )


@pretrain_app.command("recipes")
def pretrain_recipes(json: Json = False) -> None:
    """List the recipes. Example: `vitline pretrain recipes`"""
    from vit.recipes import RECIPES

    rows = [{"recipe": name, "what": recipe.what} for name, recipe in RECIPES.items()]
    show_rows("recipes", rows, ["recipe", "what"], json, "")


@pretrain_app.command("run")
def pretrain_run(
    corpus: Corpora,
    recipe: Annotated[str, typer.Option(help="Recipe; `vitline pretrain recipes` lists them.")],
    class_map: ClassMap = None,
    init_from: InitFrom = None,
    set_: Set = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Pre-train on a corpus. The same request finds the same run: it resumes, or is reused when it is finished.

    Example: `vitline pretrain run --corpus birds --recipe vit-s16-i21k`
    """
    from flows.commands.training import requested_training, train_and_show

    chosen = settings(root)
    config = requested_training(chosen.root, corpus, recipe, set_ or [], class_map, init_from)
    train_and_show(chosen, config, as_json=json)


@pretrain_app.command("branch")
def pretrain_branch(
    parent: Annotated[str, typer.Argument(help="Key of the parent run, or its first characters")],
    step: Annotated[int, typer.Option(min=1, help="Step of its checkpoint; `vitline runs show` lists those kept.")],
    cooldown_images: Annotated[
        int | None,
        typer.Option(min=1, help="Train on so many images more, in which the learning rate falls linearly to zero."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="First part of the run's name. Default: PARENT-branch.")] = None,
    set_: Set = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what it would cost, without starting it.")] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Start a new run from a kept checkpoint of another: with its network, optimizer, averages and position in the reading order,
    and its config but for what `--set` names. The parent may go on meanwhile.

    Example: `vitline pretrain branch birds-0a1b2c3d4e5f --step 60000 --set recipe.optim.peak_lr=3e-4`
    """
    from flows.commands.training import train_and_show
    from flows.requests.forms import BranchRequest
    from flows.requests.overrides import parse_overrides
    from flows.requests.training_config import resolve_branch
    from flows.requests.training_cost import training_plan

    fields = {"parent": parent, "step": step, "cooldown_images": cooldown_images, "name": name}
    request = BranchRequest.model_validate(fields | {"overrides": parse_overrides(set_ or [])})
    chosen = settings(root)
    config = resolve_branch(chosen.root, request)
    if plan:
        show_one(training_plan(config), json)
    else:
        train_and_show(chosen, config, as_json=json)


@finetune_app.command("run")
def finetune_run(
    model: Annotated[str, typer.Option(help="Published model: NAME, NAME/VERSION or URI.")],
    corpus: Annotated[str, typer.Option(help="Corpus to train on: NAME, NAME/VERSION or URI.")],
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Take steps, batch, resolution, crop and schedule from this protocol, such as vit-paper-transfer."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps; default: the protocol's, or 500. Warmup shrinks with them."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; default: the protocol's, or 0.03.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step; default: the protocol's, or 512.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Input side in px; default: the protocol's, or the model's own.")
    ] = None,
    set_: Set = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Fine-tune on a corpus as the paper does: new zero head, SGD with momentum 0.9, cosine, clip 1.

    Example: `vitline finetune run --model birds --corpus flowers --steps 500 --lr 0.03`
    """
    from flows.commands.training import train_and_show
    from flows.requests.finetune_config import resolve_finetune
    from flows.requests.forms import FinetuneRequest
    from flows.requests.overrides import parse_overrides

    fields: dict[str, Any] = {"model": model, "corpus": corpus, "protocol": protocol, "steps": steps, "peak_lr": lr}
    fields |= {"global_batch_size": batch, "image_size_px": image_size, "overrides": parse_overrides(set_ or [])}
    request = FinetuneRequest.model_validate(fields)
    chosen = settings(root)
    train_and_show(chosen, resolve_finetune(chosen.root, request), as_json=json)


@runs.command("ls")
def runs_ls(root: Root = None, json: Json = False) -> None:
    """List runs and pipelines, active ones first, then newest first: state, step, rate, time left, score.

    Example: `vitline runs ls`
    """
    from flows.catalog import list_work
    from flows.run_standing import progress_text

    where = settings(root).root
    columns = ["run", "stage", "state", "progress", "val_top1", "updated_at", "reason"]
    empty = f"No run below {where} yet; `vitline demo` or `vitline pretrain run --help` shows how to start one."
    rows = list_work(where)
    show_rows("runs", rows if json else [{**row, "progress": progress_text(row)} for row in rows], columns, json, empty)


@runs.command("show")
def runs_show(
    key: Annotated[str, typer.Argument(help="Key of a run or pipeline, or its first characters")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Show the state, last metrics and config of a run or pipeline. Example: `vitline runs show emoji-0a1b2c3d4e5f`"""
    from flows.catalog import show_work
    from flows.run_standing import for_people

    shown = show_work(settings(root).root, key)
    show_one(shown if json else for_people(shown), json)


@runs.command("compare")
def runs_compare(
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of pipelines or runs, or their first characters. Default: the newest pipelines."),
    ] = None,
    newest: Annotated[int, typer.Option(min=2, help="Number of newest pipelines to compare without keys.")] = 7,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page of two to six pipelines: scores, noise, changes, curves, pictures."),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Compare the recipes and final metrics of runs. Example: `vitline runs compare emoji-0a1b emoji-9f8e`"""
    from flows.reports.compare_runs import compare_newest, pipelines_of

    chosen = settings(root).root
    compared = compare_newest(chosen, keys or [], newest)
    if html is not None:
        from flows.reports.comparison.page import render_comparison
        from infra.storage import open_store

        html.write_text(render_comparison(open_store(chosen), pipelines_of(chosen, keys or [], newest)))
    if json:
        console.emit(compared)
        return
    parts: dict[str, dict[str, list[Any]]] = {"Differences": compared["differences"], "Metrics": compared["metrics"]}
    for title, rows in parts.items():
        body = [[field, *(cell(v) for v in values)] for field, values in rows.items()]
        console.table(title, ["", *compared["runs"]], body)


@runs.command("sync")
def runs_sync(
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of runs or pipelines, or their first characters. Default: all below the root."),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Send MLflow what it lacks of finished and running runs, as after an outage or a rebuild. Safe to repeat.

    Example: `vitline runs sync`
    """
    from flows.to_mlflow.shipper import sync_runs

    report = sync_runs(settings(root), keys or None)
    if json:
        console.emit(report._asdict())
    else:
        console.print_result(f"{len(report.sent)} sent, {len(report.unchanged)} already in MLflow.")
        if report.deleted:
            console.print_result(f"Deleted in MLflow by a user and not sent again: {', '.join(report.deleted)}.")
        for why in dict.fromkeys(report.left.values()):
            console.say(f"not sent: {', '.join(key for key, reason in report.left.items() if reason == why)}: {why}")
    if report.left:
        raise typer.Exit(1)


@nights.command("list")
def nights_list(
    name: Series = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write this file: scores over time, with noise, data and cost.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """List the nights, newest first, each with its verdict in one sentence.

    Example: `vitline nights list --html nights.html`
    """
    from flows.nights.from_records import known_nights
    from flows.nights.night_page import NIGHT_COLUMNS, night_row
    from infra.records import UnreadableRecord
    from infra.storage import open_store

    odd: list[UnreadableRecord] = []
    chosen = settings(root).root
    rows = [night_row(night) for night in known_nights(open_store(chosen), odd.append) if name in (None, night.name)]
    empty = f"No night below {chosen} yet; the schedule of pretrain-then-transfer/nightly starts one."
    if html is not None and rows:
        from flows.nights.trend.page import render_trend
        from flows.nights.trend.trend import all_series

        html.write_text(render_trend(chosen, all_series(open_store(chosen), name, lambda seen: None)))
        console.say(f"written to {html.absolute()}")
    show_rows("nights", rows, list(NIGHT_COLUMNS), json, empty, odd)


@nights.command("show")
def nights_show(
    night: Annotated[str, typer.Argument(help="UTC date of the night, such as 2026-11-23, or `last`.")],
    name: Series = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show the verdict of a night, made again from the records: differences, noise, and what has changed.

    Example: `vitline nights show last`
    """
    from flows.nights.show import chosen_night, made_again, print_night
    from infra.storage import open_store

    store = open_store(settings(root).root)
    shown = made_again(store, chosen_night(store, night, name))
    if json:
        console.emit(shown.model_dump(mode="json"))
    else:
        print_night(shown)


@flows_app.command("deploy")
def flows_deploy(
    nightly: Annotated[bool, typer.Option("--nightly", help="Activate new schedules at once.")] = False,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            help="Work pool of all deployments. Default: each keeps its own; new ones use that of the others, or vitline.",
        ),
    ] = None,
    job_variable: Annotated[
        list[str] | None,
        typer.Option(
            "--job-variable",
            help="Set a variable of the pool's jobs: `--job-variable image=vitline:1`, the value as JSON or text. "
            "Repeatable; other variables stay. Prefect shows them, so they must hold no secrets.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify",
            help="Notification block that alerts send to, as TYPE/NAME: `--notify slack-webhook/vision-team`. Alerts that have an "
            "action already stay as they are.",
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Register every flow with its form at the Prefect server of $PREFECT_API_URL, and create the alerts that were never created;
    edits made in Prefect are kept.

    Example: `vitline flows deploy --pool gpus --job-variable namespace=training`
    """
    from flows.alerts.automations import alert_lines, create_alerts
    from flows.on_prefect.registration import register, registration_lines
    from flows.requests.overrides import parse_assignments

    variables = parse_assignments(job_variable or [], "--job-variable", "NAME=VALUE")
    done = register(settings(root), nightly_active=nightly, pool=pool, job_variables=variables)
    alerts = create_alerts(notify)
    if json:
        console.emit({"deployments": [deployment.row for deployment in done], "alerts": alerts._asdict()})
    else:
        for text in [*registration_lines(done), *alert_lines(alerts, notify)]:
            console.print_result(text)
    if any(deployment.problem for deployment in done):
        raise typer.Exit(1)


@flows_app.command("ls")
def flows_ls(root: Root = None, json: Json = False) -> None:
    """List the deployments and the values that fill their forms. Example: `vitline flows ls`"""
    from flows.on_prefect.deployments import DEPLOYMENTS

    rows = [{"deployment": d.full_name, "what": d.description, "filled in": d.request} for d in DEPLOYMENTS]
    show_rows("deployments", rows, ["deployment", "what", "filled in"], json, "")


@flows_app.command("trigger")
def flows_trigger(
    deployment: Annotated[str, typer.Argument(help="FLOW/DEPLOYMENT; `vitline flows ls` lists them.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set a field of the form: `--set seed=1`. Repeatable.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the flow run to its end.")] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Start a deployment as the Prefect UI does, after the same checks.

    Example: `vitline flows trigger pretrain-then-transfer/demo --set seed=1 --wait`
    """
    from flows.commands.trigger import follow, trigger
    from flows.requests.overrides import parse_overrides

    run, page = trigger(settings(root), deployment, parse_overrides(set_ or []))
    console.say(f"started {run.name}: {page}")
    ended = follow(run.id) if wait else run
    state = ended.state
    shown = {"flow_run": str(run.id), "page": page, "state": state and state.name, "message": state and state.message}
    show_one(shown, json)
    if wait and (state is None or not state.is_completed()):
        raise typer.Exit(1)


@ops.command("doctor")
def ops_doctor(root: Root = None, json: Json = False) -> None:
    """Check versions, store, conditional writes, memory, disk and Ray; say what to do about each failure.

    Example: `vitline ops doctor`
    """
    from flows.ops.doctor import examine

    checks = examine(settings(root))
    if json:
        console.emit({"checks": [check._asdict() for check in checks]})
    else:
        console.table(
            "Doctor", ["", "check", "found", "what to do"], [[c.mark, c.name, c.found, c.advice] for c in checks]
        )
    if any(not check.ok for check in checks):
        raise typer.Exit(1)


@ops.command("reconcile")
def ops_reconcile(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")] = False,
    quiet_minutes: Annotated[
        float, typer.Option(min=0, help="Leave alone what had a heartbeat within this time.")
    ] = 5.0,
    root: Root = None,
    json: Json = False,
) -> None:
    """Bring what killed processes and lost machines left to an end state; send MLflow what it lacks. Safe to repeat.

    Example: `vitline ops reconcile --dry-run`
    """
    from flows.commands.ops_commands import reconcile_now

    findings = reconcile_now(settings(root), dry_run=dry_run, quiet_minutes=quiet_minutes)
    rows = [finding._asdict() for finding in findings]
    show_rows("findings", rows, ["subject", "problem", "action"], json, "No inconsistencies.")


@ops.command("collect-garbage")
def ops_collect_garbage(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the garbage; without it, only list it.")] = False,
    older_than_days: Annotated[float, typer.Option(min=0, help="Keep everything younger than this.")] = 7.0,
    keep_checkpoints: Annotated[
        int, typer.Option(min=0, help="Number of newest checkpoints to keep of every finished run.")
    ] = 1,
    unfinished_days: Annotated[
        float, typer.Option(min=1, help="Keep what unfinished runs and preparations left for this long a silence.")
    ] = 90.0,
    flow_runs_days: Annotated[
        float, typer.Option(min=1, help="Keep vitline's flow runs in Prefect for this long.")
    ] = 90.0,
    keep: Annotated[
        list[str] | None, typer.Option(help="Key of a run or name of a corpus to keep, or its first characters.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """List or delete what is no longer needed: leftovers of killed writers, old checkpoints, work files, trials, flow runs.

    Example: `vitline ops collect-garbage --older-than-days 30`
    """
    from flows.commands.ops_commands import collect_garbage_now

    chosen = {
        "dry_run": not delete,
        "older_than_days": older_than_days,
        "keep_checkpoints": keep_checkpoints,
        "unfinished_days": unfinished_days,
        "flow_runs_days": flow_runs_days,
        "keep": keep or [],
    }
    rows = [finding._asdict() for finding in collect_garbage_now(settings(root), chosen)]
    show_rows("findings", rows, ["subject", "problem", "action"], json, "No garbage.")


@ops.command("preempt")
def ops_preempt(
    key: Annotated[str, typer.Argument(help="Run key or its first characters")], root: Root = None, json: Json = False
) -> None:
    """Ask an active run to write a checkpoint and stop. The flow or command that follows it, or the same request, resumes it.

    Example: `vitline ops preempt emoji-0a1b2c3d4e5f`
    """
    from flows.ops.preempt import preempt

    show_one(preempt(settings(root).root, key), json)


def problem_and_option(problem: Mapping[str, Any]) -> str:
    """A validation error of a config as a sentence: field, expectation, value, and how to change it."""
    from flows.requests import refusals

    where, text = refusals.settable_path(problem["loc"]), refusals.problem_text(problem)
    if where.startswith(("source.", "recipe", "execution")) or (len(problem["loc"]) > 1 and where == "source"):
        rule_between_fields = isinstance(problem.get("input"), Mapping)
        # An element of a list cannot be set by itself.
        whole = refusals.settable_path([*itertools.takewhile(lambda part: isinstance(part, str), problem["loc"])])
        text += f". `--set {f'{where}.FIELD' if rule_between_fields else whole}=VALUE` changes it"
    return f"{text}."


def main() -> None:
    """Entry point: exit codes 0 ok, 1 failed, 2 usage or invalid config, 130 after Ctrl-C."""
    try:
        stack_commands.join_stack(sys.argv[1:])
        app()
    except SystemExit as end:
        if end.code == 130:  # typer turns Ctrl-C into this
            console.say("stopped; the same command resumes from the finished checkpoints, examined parts and shards")
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
        from flows.stages.stage import Skipped

        console.say(f"{'skipped' if isinstance(error, Skipped) else 'error'}: {error}")
        sys.exit(0 if isinstance(error, Skipped) else 1)


if __name__ == "__main__":
    main()
