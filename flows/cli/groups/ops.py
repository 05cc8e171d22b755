"""`vitline ops`: checks, repairs, garbage, preemption."""

from typing import Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows
from vitline.flows.cli.form_options import form_command
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.forms import CollectGarbageRequest, ReconcileRequest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("doctor")
def ops_doctor(
    shard_cache_dir: Annotated[
        str, typer.Option(help="Also check the free disk at this folder, as of `execution.shard_cache_dir`.")
    ] = "",
    root: Root = None,
    json: Json = False,
) -> None:
    """Check versions, store, memory, disk, services, all nodes of Ray and all work pools; suggest a fix for each failure.

    Example: `vitline ops doctor`
    """
    from vitline.flows.ops.doctor import examine

    checks = examine(settings(root), shard_cache_dir)
    if json:
        console.emit({"checks": [check._asdict() for check in checks]})
    else:
        show_table(
            "Doctor", ["", "check", "found", "what to do"], [[c.mark, c.name, c.found, c.advice] for c in checks]
        )
    if any(not check.ok for check in checks):
        raise typer.Exit(1)


@form_command(app, "reconcile", ReconcileRequest, without=("stalled_minutes", "min_free_gb"))
def ops_reconcile(fields: dict[str, Any], root: Root = None, json: Json = False) -> None:
    """End runs, jobs and flow runs that killed processes and lost machines left unfinished; send MLflow what it is missing. Safe to repeat.

    Example: `vitline ops reconcile --dry-run`
    """
    from vitline.flows.cli.housekeeping import reconcile_now

    rows = [finding._asdict() for finding in reconcile_now(settings(root), fields)]
    show_rows("findings", rows, ["subject", "problem", "action"], json, "No inconsistencies.")


@form_command(app, "collect-garbage", CollectGarbageRequest, without=("dry_run", "notice_days"))
def ops_collect_garbage(
    fields: dict[str, Any],
    delete: Annotated[bool, typer.Option("--delete", help="Delete the garbage; without it, only list it.")] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """List or delete what is no longer needed: leftovers of killed processes, old checkpoints, work files, trials, flow runs.

    Example: `vitline ops collect-garbage --older-than-days 30`
    """
    from vitline.flows.cli.housekeeping import collect_garbage_now

    rows = [found._asdict() for found in collect_garbage_now(settings(root), {**fields, "dry_run": not delete})]
    show_rows("findings", rows, ["subject", "problem", "action"], json, "No garbage.")


@app.command("preempt")
def ops_preempt(
    key: Annotated[str, typer.Argument(help="Run key or its first characters")], root: Root = None, json: Json = False
) -> None:
    """Stop an active run to make room for others. A training, and each running trial of an evaluation, writes a checkpoint first.

    The flow or command that follows the run, or the same request, resumes it.

    Example: `vitline ops preempt icons-0a1b2c3d4e5f`
    """
    from vitline.flows.ops.preempt import preempt

    show_one(preempt(settings(root).root, key), json)


@app.command("metrics")
def ops_metrics(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Serve them at http://HOST:PORT/metrics; without it, print them once."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve at; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    root: Root = None,
) -> None:
    """Show runs, speed, waits, checkpoints and nights as Prometheus metrics. They are read from the store at each request.

    Example: `vitline ops metrics --port 9464`
    """
    from vitline.flows.ops.metrics import metrics_text, serve

    if port is None:
        console.print_result(metrics_text(settings(root).root).rstrip())
    else:
        serve(settings(root).root, host, port)
