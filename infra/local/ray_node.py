"""Ray as a service of the local stack: the command of a one-node Ray behind its page, its environment, and the check that it works.
Further nodes may join it; they run the same command without the page."""

import inspect
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from vitline.infra.local.processes import STILL_S, Stillness, free_ports, short_temporary
from vitline.infra.local.stack_config import StackConfig
from vitline.infra.ray_jobs import ONE_TRAINING
from vitline.infra.settings import Settings

AGENT_PORTS = 4
TLS_FOLDER = "ray-tls"
_NO_LIMIT_S = "86400"
"""For Ray's own limits of starting: `Stillness` ends what makes no progress."""
# Variables that would connect this Ray, or its drivers, to something else.
FOREIGN_TO_RAY = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_TMPDIR",
)


def command(config: StackConfig) -> list[str]:
    """The command that runs it in the foreground, behind its page. Ports other than that of the page are free ones."""
    dashboard, client, *agents = free_ports(2 + AGENT_PORTS)
    options = {
        "port": 0,
        "ray-client-server-port": client,  # not used, but Ray always opens it
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "temp-dir": session_folder(config),
        "object-store-memory": config.object_store_bytes,
        "resources": json.dumps({ONE_TRAINING: 1}),
    }
    if labels := Settings().node_labels_text():
        options["labels"] = labels  # its jobs ask for them
    if config.num_cpus is not None:
        options["num-cpus"] = config.num_cpus
    if config.node_address is not None:
        options["node-ip-address"] = config.node_address
    page = [sys.executable, "-P", "-m", "vitline.infra.local.access.ray_page", f"--port={config.ports['ray']}"]
    page += [f"--dashboard-port={dashboard}", f"--login={config.login}", "--"]
    return [*page, *node_command(options, agents), "--head", "--no-monitor"]


def further_command(config: StackConfig, address: str) -> list[str]:
    """The command that runs a further node in the foreground: it joins the Ray at `address`."""
    options = {
        "address": address,
        "temp-dir": session_folder(config),
        "num-cpus": config.num_cpus,
        "object-store-memory": config.object_store_bytes,
    }
    return node_command(options, free_ports(AGENT_PORTS))


def environment(config: StackConfig) -> dict[str, str]:
    """Variables for its processes, in addition to the inherited ones, from which FOREIGN_TO_RAY must be removed.

    Makes the certificates that all gRPC clients and servers of this Ray must have. Ray checks its token only after it has begun
    some calls: one `RaySyncer.StartSync` without a token ends a raylet.
    """
    from vitline.infra.local.access.mutual_tls import make_certificates  # takes 0.1 s to import

    tls = make_certificates(config.folder / TLS_FOLDER, more_machines=config.more_nodes)
    authority, certificate, key = map(str, tls)
    page = {"RAY_OVERRIDE_DASHBOARD_URL": f"127.0.0.1:{config.ports['ray']}"} if "ray" in config.ports else {}
    return {
        **page,  # what drivers print
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": authority,
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        # Its name is older than its use: with 0, the address of the node is 127.0.0.1, and Ray listens there only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if config.more_nodes else "0",
        "DASHBOARD_METRIC_PORT": str(free_ports(1)[0]),  # by default a fixed port, which the first stack occupies
        # The defaults are 30 to 100 s, which are too short on a busy machine.
        "RAY_gcs_server_port_wait_time_s": _NO_LIMIT_S,
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": _NO_LIMIT_S,
        "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": _NO_LIMIT_S,
        "RAY_agent_register_timeout_ms": f"{_NO_LIMIT_S}000",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise every driver copies the working directory under `uv run`
        "VITLINE_ONE_NODE_RAY": "" if config.more_nodes else "1",  # tells jobs not to wait for GPUs of further nodes
        # Workers that Ray starts for a first driver lack the environment of its job: it never uses them.
        "RAY_prestart_worker_first_driver": "0",
        # By default every 5 s: the load of this node on the dashboard, and metrics, which have no reader here.
        "REPORTER_UPDATE_INTERVAL_MS": "30000",
        "METRICS_RECORD_INTERVAL_S": "30",
        "RAY_metrics_report_interval_ms": "60000",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process of each training that watches other nodes
        **short_temporary(config.folder),  # its dashboard has sockets there
    }


def problem(config: StackConfig, timeout_s: float = 5.0) -> str:
    """Empty if the job server shows a living node, else what is wrong."""
    address = config.url("ray")
    request = urllib.request.Request(f"{address}/api/v0/nodes")
    request.add_header("Authorization", f"Bearer {config.ray_token.read_text()}")
    # The job server answers seconds before there is a node, and even if there will never be one.
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            nodes = json.load(reply)["data"]["result"]["result"]
    except (OSError, ValueError, KeyError) as error:
        return f"its job server {address} does not answer ({error})"
    return "" if any(n["state"] == "ALIVE" for n in nodes) else f"its job server {address} shows no living node"


def keep_logs(config: StackConfig, log_dir: Path) -> None:
    """Moves the logs of Ray's processes and of drivers to `log_dir`, and removes the rest of its session."""
    for logs in session_folder(config).glob("session_2*/logs"):
        shutil.copytree(logs, log_dir / logs.parent.name, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(session_folder(config), ignore_errors=True)


def session_folder(config: StackConfig) -> Path:
    return config.folder / "ray"


def address_to_join(config: StackConfig) -> str:
    """The address at which further nodes join; empty until the head has written it, a little after its job server answers."""
    file = session_folder(config) / "ray_current_cluster"
    return file.read_text().strip() if file.exists() else ""


def node_command(options: Mapping[str, object], agent_ports: Sequence[int]) -> list[str]:
    """The command that runs a node in the foreground, with AGENT_PORTS free ports for its agents: the raylet ends if one has not chosen
    its own within a fixed 15 s, as on a busy machine."""
    agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
    ports = {"min-worker-port": 0, "max-worker-port": 0} | {
        f"{of}-port": port for of, port in zip(agents, agent_ports, strict=True)
    }
    program = "from vitline.infra.local.ray_node import ray_start; ray_start()"
    command = [sys.executable, "-P", "-c", program, "start", "--block", "--disable-usage-stats", "--log-color=false"]
    return command + [f"--{name}={value}" for name, value in {**ports, **options}.items()]


def ray_start() -> None:
    """The command `ray` of this process's arguments, whose `start` waits for its node while it makes progress: Ray itself gives up
    after a fixed 30 s, which a busy machine may need for more than its start. The raylet gives up if the agent has not written
    within 15 s which port it listens on, also if it was given that port: it is written here."""
    from ray import _raylet
    from ray._private import services
    from ray.scripts.scripts import main as ray

    get_node: Callable[..., Any] = services.get_node
    start_raylet: Callable[..., Any] = services.start_raylet
    compiled: Any = _raylet  # without types
    stillness = Stillness()

    def patient(*arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return get_node(*arguments, **named)
            except RuntimeError:
                ended = any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
                if ended or stillness.seconds(os.getpid()) > STILL_S:
                    raise
            time.sleep(0.2)

    def told_the_port(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*arguments, **named).arguments
        if port := given.get("dashboard_agent_listen_port"):
            compiled.persist_port(given["session_dir"], given["node_id"], "dashboard_agent_listen_port", port)
        return start_raylet(*arguments, **named)

    services.get_node, services.start_raylet = patient, told_the_port
    ray()
