"""`vitline stack`: the servers of this machine, and how every other command finds them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flows import console
from flows.command_line import Json
from infra.local.paths import local_dir
from infra.settings import NO_TELEMETRY, Settings, join_environment

app = typer.Typer(
    help="The local stack: S3 store, MLflow, Prefect with a worker, one-node Ray.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Port = Annotated[int | None, typer.Option(help="Default: that of the last start, the well-known one, or a free one.")]
# What a process has of another store, or another cluster, would not open this one.
FOREIGN = ("AWS_", "RAY_AUTH_")


@app.command("up")
def stack_up(
    s3_port: Port = None,
    mlflow_port: Port = None,
    prefect_port: Port = None,
    ray_port: Port = None,
    json: Json = False,
) -> None:
    """Start everything, see that it works, and register the flows with Prefect. Running already, it is left alone.

    Example: `vitline stack up`
    """
    ports = {"s3": s3_port, "mlflow": mlflow_port, "prefect": prefect_port, "ray": ray_port}
    start_and_join(Settings(), {name: port for name, port in ports.items() if port is not None})
    show_stack(Settings(), json)


@app.command("down")
def stack_down(json: Json = False) -> None:
    """End everything, jobs and flow runs included; what was stored stays. Example: `vitline stack down`"""
    from infra.local.stack import stop_stack

    directory = stack_dir(Settings())
    ended = stop_stack(directory)
    if json:
        console.emit({"was_up": ended, "directory": str(directory)})
    else:
        console.tell(f"The stack in {directory} is down." if ended else f"No stack was up in {directory}.")


@app.command("status")
def stack_status(json: Json = False) -> None:
    """What runs, whether it works now, where it listens, what it takes. Ends with 1 unless all of it works.

    Example: `vitline stack status`
    """
    if not show_stack(Settings(), json):
        raise typer.Exit(1)


@app.command("restart")
def stack_restart(
    name: Annotated[str, typer.Argument(help="s3, mlflow, prefect, prefect-worker or ray")], json: Json = False
) -> None:
    """End one service in order and start it again on the same ports. Example: `vitline stack restart mlflow`"""
    from infra.local.stack import find_stack, restart_service

    directory = stack_dir(Settings())
    restart_service(directory, name)
    state = find_stack(directory)
    service = next(service for service in state.services if service.name == name) if state else None
    if json:
        console.emit(service.model_dump() if service else {})
    else:
        console.tell(f"{name} is up again{f' at {service.url}' if service and service.url else ''}.")


def start_and_join(settings: Settings, ports: dict[str, int] | None = None) -> Settings:
    """The stack, started where none is up, with the flows registered; this process uses it from now on. Its settings."""
    from infra.local.paths import log_dir
    from infra.local.stack import start_stack

    directory = stack_dir(settings)
    foreign = {"root": "VITLINE_ROOT", "ray_address": "RAY_ADDRESS"}
    if named := [variable for field, variable in foreign.items() if field in settings.model_fields_set]:
        raise ValueError(
            f"{' and '.join(named)} is set, but the local stack has a store and a Ray of its own. Unset it, "
            "or set PREFECT_API_URL as well to use your own servers."
        )
    console.say(f"local stack in {directory}, logs in {log_dir(settings)}")
    start_stack(directory, log_dir=log_dir(settings), ports=ports or {}, announce=lambda text: console.say(f"  {text}"))
    join(directory)
    joined = Settings()
    from flows.deployments import register  # Prefect reads its settings when it is imported: not before joining

    console.say(f"  registered {len(register(joined))} deployments")
    return joined


def join_stack(arguments: Sequence[str]) -> None:
    """Lets this process use the local stack, if one is up and the person has not named a store or a cluster.

    Where there is one that is down, says so: what lies in its store cannot be seen without it. With or without a stack,
    no library reports home.
    """
    join_environment(NO_TELEMETRY)
    settings = Settings()
    asked = {argument.split("=")[0] for argument in arguments}
    if not arguments or asked & {"--root", "--help", "-h"} or arguments[0] in ("stack", "demo"):
        return
    if {"root", "ray_address"} & settings.model_fields_set or not (stack_dir(settings) / "place.json").exists():
        return
    from infra.local.stack import find_stack

    directory = stack_dir(settings)
    if find_stack(directory):
        join(directory)
    else:
        console.say(
            f"the local stack in {directory} is down, and its store cannot be seen; `vitline stack up` starts it"
        )


def join(directory: Path) -> None:
    from infra.local.stack import stack_environment

    join_environment(stack_environment(directory), instead_of=FOREIGN)


def stack_dir(settings: Settings) -> Path:
    """Where the stack of this folder keeps its things."""
    return local_dir(settings) / "stack"


def show_stack(settings: Settings, as_json: bool) -> bool:
    """Services, links and open ports on stdout; whether all of it works."""
    from infra.local.stack import check_services, find_stack, listeners, memory_bytes, stack_links

    directory = stack_dir(settings)
    state = find_stack(directory)
    if state is None:
        report: dict[str, Any] = {"up": False, "directory": str(directory), "services": []}
        if as_json:
            console.emit(report)
        else:
            console.tell(f"No stack is up in {directory}; `vitline stack up` starts it.")
        return False
    found, memory, links = check_services(directory), memory_bytes(directory), stack_links(directory)
    open_ports = listeners(directory)
    services = [
        {**s.model_dump(), "problem": s.problem or found[s.name], "memory_bytes": memory.get(s.name)}
        for s in state.services
    ]
    works = all(service["state"] == "up" and not service["problem"] for service in services)
    if as_json:
        ports = [port._asdict() for port in open_ports]
        report = {"up": works, "directory": str(directory), "services": services, "links": links, "listeners": ports}
        console.emit(report)
        return works
    rows = [
        [s["name"], s["state"], s["url"] or "-", f"{(s['memory_bytes'] or 0) / 1e6:,.0f} MB", str(s["restarts"])]
        for s in services
    ]
    console.table("Local stack", ["service", "state", "address", "memory", "restarts"], rows, right=(3, 4))
    for service in services:
        if service["problem"]:
            console.tell(f"{service['name']}: {service['problem']}\n  log: {service['log']}")
    for what, url in links.items():
        console.tell(f"{what:<14} {url}")
    for line in told_ports(open_ports):
        console.tell(line)
    console.tell(f"{'Logs':<14} {Path(state.services[0].log).parent}")
    console.tell(f"{'Ends with':<14} vitline stack down")
    return works


def told_ports(open_ports: Sequence[Any]) -> list[str]:
    """Which ports listen where, a line for each service and reach."""
    lines = []
    for beyond in (False, True):
        for name in dict.fromkeys(port.service for port in open_ports):
            numbers = sorted({p.port for p in open_ports if p.service == name and p.loopback != beyond})
            if numbers:
                where = "on all addresses" if beyond else "on loopback"
                wants = " (Ray opens these itself; they want its token, its counters excepted)" if beyond else ""
                lines.append(f"{name:<14} listens {where}: {', '.join(map(str, numbers))}{wants}")
    if not any(not port.loopback and port.service != "ray" for port in open_ports):
        lines.append("Nothing but Ray can be reached from other machines.")
    return lines
