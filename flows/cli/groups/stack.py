"""`vitline stack`: starts and stops the local servers, and lets every other command use them."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json
from vitline.flows.cli.command_line import settings as settings_of
from vitline.flows.cli.tables import show_table

if TYPE_CHECKING:
    from vitline.infra.local.state import StackState
    from vitline.infra.settings import Settings

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Port = Annotated[
    int | None, typer.Option(help="Default: the port of the last start, else the well-known one, else a free one.")
]
RAY_ELSEWHERE = "While a training runs, the ports of its workers listen there (torch.distributed), without a login."


@app.command("up")
def stack_up(
    s3_port: Port = None,
    mlflow_port: Port = None,
    prefect_port: Port = None,
    ray_port: Port = None,
    json: Json = False,
) -> None:
    """Start the servers, check that they work, and register the flows with Prefect. A running stack is left alone.

    What is set in the environment or in `vitline.toml` is not started: with PREFECT_API_URL no Prefect server, with MLFLOW_TRACKING_URI
    no MLflow, with RAY_ADDRESS no Ray, with VITLINE_ROOT (s3://bucket/prefix, a folder) no S3 server. The others use these with the
    credentials of this environment.

    Example: `vitline stack up`
    """
    ports = {"s3": s3_port, "mlflow": mlflow_port, "prefect": prefect_port, "ray": ray_port}
    start_and_join(settings_of(), {name: port for name, port in ports.items() if port is not None})
    show_stack(settings_of(), json)


@app.command("down")
def stack_down(json: Json = False) -> None:
    """Stop the servers with all jobs and flow runs, and list the interrupted runs; stored data is kept.

    Example: `vitline stack down`
    """
    from vitline.infra.local.stack import stop_stack
    from vitline.infra.local.stack_config import load_stack_config

    directory = stack_dir(settings_of())
    interrupted = interrupted_by_the_end(directory)
    ended, config = stop_stack(directory), load_stack_config(directory)
    yours = dict(config.foreign) if config and ended else {}
    if json:
        console.emit({"was_up": ended, "directory": str(directory), "interrupted": interrupted, "yours": yours})
    else:
        console.print_result(f"The stack in {directory} is down." if ended else f"No stack was running in {directory}.")
        for name, address in yours.items():
            console.print_result(f"{name}: yours, at {address}, runs on")


def interrupted_by_the_end(directory: Path) -> list[str]:
    """The keys of the runs and pipelines that stopping the stack interrupts; prints them and how to resume them. Nothing where flow
    runs or jobs may go on elsewhere."""
    from vitline.infra.local.stack import check_services, find_stack

    if find_stack(directory) is None or not runs_everything(directory):
        return []
    problems = check_services(directory)
    if away := [f"{name}: {problems[name]}" for name in ("s3", "prefect") if problems.get(name)]:
        console.say(f"The running work cannot be listed, and is interrupted: {'; '.join(away)}")
        return []
    join(directory)
    from vitline.flows.catalog.run_status import progress_text
    from vitline.flows.cli.interrupted import note_interrupted

    try:
        rows = note_interrupted(settings_of(), directory)
    except Exception as error:  # the stack ends all the same
        console.say(f"The running work cannot be listed, and is interrupted: {error}")
        return []
    for row in rows:
        parts = [row["stage"], row["state"], progress_text(row)]
        console.say(f"Interrupts {row['run']}: {', '.join(part for part in parts if part)}")
    if rows:
        console.say(
            "Checkpoints and finished stages, shards and trials are kept. `vitline stack up` prints the command that resumes the "
            "flow runs; a run that a command started is resumed by the same command."
        )
    return [row["run"] for row in rows]


def runs_everything(directory: Path) -> bool:
    """Whether all flow runs and jobs end with the stack: Prefect and Ray are its own."""
    from vitline.infra.local.stack_config import load_stack_config

    config = load_stack_config(directory)
    return config is not None and config.starts("prefect") and config.starts("ray")


@app.command("status")
def stack_status(json: Json = False) -> None:
    """Show the servers: state, address, memory, open ports and problems. Exits with 1 unless all of them work.

    Example: `vitline stack status`
    """
    if not show_stack(settings_of(), json):
        raise typer.Exit(1)


@app.command("env")
def stack_env() -> None:
    """Print the variables with which other programs use the stack, credentials included, as lines for a shell.

    Example: `eval "$(vitline stack env)"`
    """
    from vitline.infra.local.stack import stack_environment

    for name, value in stack_environment(stack_dir(settings_of())).items():
        console.print_result(f"export {name}={shlex.quote(value)}")


@app.command("restart")
def stack_restart(
    name: Annotated[str, typer.Argument(help="s3, mlflow, sender, prefect, prefect-worker or ray")], json: Json = False
) -> None:
    """Restart one service on the same ports. Example: `vitline stack restart mlflow`"""
    from vitline.infra.local.stack import find_stack, restart_service

    directory = stack_dir(settings_of())
    restart_service(directory, name)
    state = find_stack(directory)
    service = next(service for service in state.services if service.name == name) if state else None
    if json:
        console.emit(service.model_dump() if service else {})
    else:
        console.print_result(f"{name} is up again{f' at {service.url}' if service and service.url else ''}.")


def start_and_join(settings: "Settings", ports: dict[str, int] | None = None) -> "Settings":
    """Starts the stack if none is up, registers the flows, makes this process use the stack, and returns its settings."""
    from vitline.flows.ops.own_servers import refuse_unusable
    from vitline.infra.local.paths import log_dir
    from vitline.infra.local.stack import find_stack, start_stack
    from vitline.infra.local.stack_config import load_stack_config

    directory, began = stack_dir(settings), time.time()
    root = settings.root if "root" in settings.model_fields_set else None
    before = load_stack_config(directory)
    endpoint = settings.s3_endpoint_url
    if endpoint and not (root or (before and (before.root or endpoint == before.url("s3")))):
        raise ValueError(
            f"AWS_ENDPOINT_URL is {endpoint}, but no store there is named. Set VITLINE_ROOT=s3://BUCKET/PREFIX, or unset AWS_ENDPOINT_URL "
            "for a store of the stack."
        )
    servers = {
        "prefect": settings.prefect_api_url,
        "mlflow": settings.mlflow_tracking_uri,
        "ray": settings.job_server(),
    }
    was_up = find_stack(directory) is not None
    console.say(f"local stack in {directory}, logs in {log_dir(settings)}")
    start_stack(
        directory,
        log_dir=log_dir(settings),
        ports=ports or {},
        root=root,
        foreign={name: address for name, address in servers.items() if address},
        check=lambda config: refuse_unusable(config, check_registered_at_own_prefect),
        announce=lambda text: console.say(f"  {text}"),
    )
    join(directory)
    joined = settings_of()
    # After joining, because Prefect reads its settings on import.
    from vitline.flows.cli.interrupted import end_interrupted, write_home_now
    from vitline.flows.on_prefect.alerts.automations import alert_lines, create_alerts
    from vitline.flows.on_prefect.deploy.registration import register, registration_lines

    interrupted = []
    if not was_up and runs_everything(directory):
        try:
            interrupted = end_interrupted(joined, directory, began)
        except Exception as error:  # the servers work all the same
            console.say(f"  what was interrupted could not be ended: {error} `vitline ops reconcile` tries again.")
    for text in [*registration_lines(register(joined)), *alert_lines(create_alerts(), None)]:
        console.say(f"  {text}")
    write_home_now(joined)
    if interrupted:
        names = " ".join(map(shlex.quote, interrupted))
        console.say(f"  `vitline flows resume {names}` resumes what was interrupted when the stack went down")
    return joined


def check_registered_at_own_prefect(settings: "Settings") -> None:
    """Raises ValueError where the deployments belong to another root. To be called after joining: Prefect reads its settings on import."""
    from vitline.flows.on_prefect.deploy.registration import check_registered

    check_registered(settings)


def join_stack(arguments: Sequence[str]) -> None:
    """Makes this process use the local stack, if one is up and the user has not configured a store or cluster.

    If the stack is down, prints that, because its store cannot be read without it. In any case, turns off the telemetry of
    libraries.
    """
    options = {argument.split("=")[0] for argument in arguments}
    if not arguments or options & {"--help", "-h", "--version"}:
        return
    from vitline.infra.settings import NO_TELEMETRY, join_environment
    from vitline.infra.settings_file import use_settings_file

    join_environment(NO_TELEMETRY)
    use_settings_file()
    settings = settings_of()
    if "--root" in options or arguments[0] in ("stack", "demo"):
        return
    from vitline.infra.local.running_stack import find_running_stack, stopped_message

    if (directory := find_running_stack(settings)) is None:
        return
    from vitline.infra.local.stack import find_stack
    from vitline.infra.local.stack_config import load_stack_config

    config = load_stack_config(directory)
    if find_stack(directory):
        join(directory)
    elif config and config.root:
        join_environment({"VITLINE_ROOT": config.root, **config.root_settings})
        console.say(f"the local stack in {directory} is down; `vitline stack up` starts it. Its store is {config.root}")
    else:
        console.say(stopped_message(directory))


def join(directory: Path) -> None:
    from vitline.infra.local.running_stack import foreign_to
    from vitline.infra.local.stack import stack_environment
    from vitline.infra.local.stack_config import load_stack_config
    from vitline.infra.settings import join_environment

    instead_of = foreign_to(load_stack_config(directory))
    join_environment(stack_environment(directory), instead_of=instead_of, source="the local stack")


def stack_dir(settings: "Settings") -> Path:
    """The directory of the stack of this folder."""
    from vitline.infra.local import running_stack

    return running_stack.stack_dir(settings)


def show_stack(settings: "Settings", as_json: bool) -> bool:
    """Prints services, links and open ports; returns whether all services work."""
    from vitline.flows.on_prefect.home.address import home_url
    from vitline.flows.ops.own_servers import examine_own
    from vitline.flows.ops.server_http import experiment_pages
    from vitline.infra.local.stack import find_stack, listeners, login_file, memory_bytes, stack_links
    from vitline.infra.local.stack_config import load_stack_config

    directory = stack_dir(settings)
    state = find_stack(directory)
    if state is None:
        report: dict[str, Any] = {"up": False, "directory": str(directory), "services": []}
        if as_json:
            console.emit(report)
        else:
            console.print_result(f"No stack is running in {directory}; `vitline stack up` starts it.")
        return False
    found, memory, links = problems_of(directory, state), memory_bytes(directory), stack_links(directory)
    open_ports, root, login = listeners(directory), state.env["VITLINE_ROOT"], login_file(directory)
    services = [
        {**s.model_dump(), "problem": s.problem or found[s.name], "memory_bytes": memory.get(s.name)}
        for s in state.services
    ]
    config = load_stack_config(directory)
    yours = examine_own(config) if config else []
    works = all(service["state"] == "up" and not service["problem"] for service in services)
    works = works and all(own.check.ok for own in yours)
    joined = settings_of_stack(directory)
    runs = experiment_pages(joined)
    if as_json:
        ports = [port._asdict() for port in open_ports]
        report = {"up": works, "directory": str(directory), "root": root, "services": services, "links": links}
        report["listeners"], report["login_file"], report["experiments"] = ports, str(login), runs
        report["yours"] = [{"name": own.name, "address": own.address, "ok": own.check.ok} for own in yours]
        console.emit(report)
        return works
    rows = [
        [s["name"], s["state"], s["url"] or "-", f"{(s['memory_bytes'] or 0) / 1e6:,.0f} MB", str(s["restarts"])]
        for s in services
    ]
    show_table("Local stack", ["service", "state", "address", "memory", "restarts"], rows)
    for service in services:
        if service["problem"]:
            console.print_result(f"{service['name']}: {service['problem']}\n  log: {service['log']}")
    for own in yours:
        console.print_result(own.line)
    home = home_url(joined)
    for what, url in {"Store": root, **({"Home": home} if home else {}), **links}.items():
        console.print_result(f"{what:<14} {url}")
    for name, page in runs.items():
        console.print_result(f"{'  runs':<14} {page} ({name})")
    if links:
        console.print_result(f"{'Login':<14} user:password in {login}; Prefect asks for the whole line")
    for line in port_lines(open_ports):
        console.print_result(line)
    console.print_result(f"{'Logs':<14} {Path(state.services[0].log).parent}")
    console.print_result(f"{'Stop with':<14} vitline stack down")
    return works


def settings_of_stack(directory: Path) -> "Settings":
    """The settings of a process that uses the stack."""
    from vitline.infra.local.stack import stack_environment
    from vitline.infra.settings import Settings

    return Settings(**stack_environment(directory))


def problems_of(directory: Path, state: "StackState") -> dict[str, str]:
    """The problem of each service: it does not answer, it repeats an error in its log, or its schedules start nothing."""
    from vitline.flows.ops.flow_run_checks import schedule_problems
    from vitline.infra.local.service_logs import log_problem
    from vitline.infra.local.stack import check_services

    found = check_services(directory)
    for service in state.services:
        found[service.name] = found[service.name] or log_problem(service.log)
        if service.name == "prefect" and service.url and not found["prefect"]:
            try:
                found["prefect"] = "; ".join(schedule_problems(settings_of_stack(directory)))
            except OSError as away:
                found["prefect"] = str(away)
    return found


def port_lines(open_ports: Sequence[Any]) -> list[str]:
    """Open ports as text, a line for each service and reach."""
    from vitline.infra.local.stack import reached_ports

    lines, reached = [], reached_ports(open_ports)
    for (name, reach), numbers in reached.items():
        lines.append(f"{name:<14} listens on {reach}: {', '.join(map(str, numbers))}")
    beyond = dict.fromkeys(name for name, reach in reached if reach != "loopback")
    if not beyond:
        lines.append("Nothing can be reached from other machines.")
    elif [*beyond] == ["ray"]:
        lines.append(f"Nothing but Ray can be reached from other machines. {RAY_ELSEWHERE}")
    return lines
