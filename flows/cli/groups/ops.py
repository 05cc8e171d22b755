"""`vitline ops`: checks, repairs, garbage, preemption."""

from typing import Annotated

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows

app = typer.Typer(
    help="Operations: check this machine and its services, reconcile, collect garbage, preempt.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("doctor")
def ops_doctor(root: Root = None, json: Json = False) -> None:
    """Check versions, store, conditional writes, memory, disk and Ray; say what to do about each failure.

    Example: `vitline ops doctor`
    """
    from vitline.flows.ops.doctor import examine

    checks = examine(settings(root))
    if json:
        console.emit({"checks": [check._asdict() for check in checks]})
    else:
        console.table(
            "Doctor", ["", "check", "found", "what to do"], [[c.mark, c.name, c.found, c.advice] for c in checks]
        )
    if any(not check.ok for check in checks):
        raise typer.Exit(1)


@app.command("reconcile")
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
    from vitline.flows.cli.housekeeping import reconcile_now

    findings = reconcile_now(settings(root), dry_run=dry_run, quiet_minutes=quiet_minutes)
    rows = [finding._asdict() for finding in findings]
    show_rows("findings", rows, ["subject", "problem", "action"], json, "No inconsistencies.")


@app.command("collect-garbage")
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
    from vitline.flows.cli.housekeeping import collect_garbage_now

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


@app.command("preempt")
def ops_preempt(
    key: Annotated[str, typer.Argument(help="Run key or its first characters")], root: Root = None, json: Json = False
) -> None:
    """Stop an active run to make room for others. A training writes a checkpoint first; an evaluation keeps its finished trials.

    The flow or command that follows the run, or the same request, resumes it.

    Example: `vitline ops preempt icons-0a1b2c3d4e5f`
    """
    from vitline.flows.ops.preempt import preempt

    show_one(preempt(settings(root).root, key), json)
