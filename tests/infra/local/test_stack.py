"""The local stack with its real servers: while it runs, when a process is killed, and when it stops."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from vitline.infra.children import birth_of, is_running, processes_with
from vitline.infra.local.stack import (
    check_services,
    find_stack,
    listeners,
    memory_bytes,
    restart_service,
    stack_environment,
    start_stack,
    stop_stack,
)
from vitline.infra.local.stack_config import ALL, OWNER_VARIABLE, load_stack_config, prepare_stack_config
from vitline.infra.settings import basic_authorization

from ...eventually import eventually
from ...servers.stack import own_ports

pytestmark = pytest.mark.servers


def service(directory, name):
    return next(s for s in find_stack(directory).services if s.name == name)


def processes_of(directory):
    return processes_with(OWNER_VARIABLE, f"{load_stack_config(directory).id}/")


def wait_until_all_work(directory, services=("s3",)):
    """A check waits for its answer only for seconds, so a single one may fail on a busy machine."""
    eventually(lambda: check_services(directory) == dict.fromkeys(services, ""), awaited="checks that succeed")


@pytest.fixture
def start_services(tmp_path):
    """start(services) starts a stack for this test alone, by default with the store only, and returns its folder."""
    directory = tmp_path / "stack"
    wanted = own_ports()

    def start(*services):
        start_stack(
            directory,
            log_dir=tmp_path / "logs",
            services=services or ("s3",),
            ports=wanted,
            ends_with_caller=True,
            announce=lambda text: None,
        )
        return directory

    yield start
    stop_stack(directory)


def test_all_services_are_up_and_none_listens_beyond_loopback(stack):
    state = find_stack(stack.directory)
    assert {s.name: (s.state, s.problem) for s in state.services} == {name: ("up", "") for name in ALL}
    found = listeners(stack.directory)
    assert {listener.reach for listener in found} == {"loopback"}
    there = {listener.port for listener in found}
    assert all(set(service.ports) <= there for service in state.services)
    assert all(size > 10_000_000 for size in memory_bytes(stack.directory).values())
    assert len(processes_with(OWNER_VARIABLE, f"{load_stack_config(stack.directory).id}/mlflow")) == 1


def test_no_port_of_ray_serves_a_call_without_its_certificate(stack):
    """`StartSync` ends a raylet that reads it, whatever the token."""
    ports = [x.port for x in listeners(stack.directory) if x.service == "ray"]
    assert len(ports) > 8
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")(iter([b""]), timeout=60)
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
        assert refused.value.code().name == "UNAVAILABLE", port
    wait_until_all_work(stack.directory, ALL)
    (ray,) = (service for service in find_stack(stack.directory).services if service.name == "ray")
    assert (ray.state, ray.restarts) == ("up", 0)


def test_secrets_are_stored_in_private_files_only_and_logs_in_a_private_folder(stack):
    token = (stack.directory / "ray-token").read_text()
    secrets = [token, stack.env["AWS_SECRET_ACCESS_KEY"], stack.env["MLFLOW_TRACKING_PASSWORD"]]
    kept = {stack.directory / name for name in ("ray-token", "credentials.json", "login")}
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (stack.directory, stack.log_dir)} == {0o700}
    readable = [*stack.log_dir.rglob("*.log*"), *stack.directory.rglob("*.json"), *stack.directory.rglob("*.db")]
    readable += [stack.directory / "s3" / "mini.options"]
    assert len(readable) > 8
    for path in {p for p in readable if p.is_file()} - kept:
        text = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in text], path
    assert not any(secret in json.dumps(find_stack(stack.directory).model_dump()) for secret in secrets)


def test_starting_a_running_stack_returns_its_state(stack):
    said = []
    before = find_stack(stack.directory)
    assert start_stack(stack.directory, log_dir=stack.log_dir, announce=said.append) == before
    assert said == ["the stack is already up"]
    with pytest.raises(RuntimeError, match=re.compile(r"mlflow runs on port \d+, not 1234.*`vitline stack down`")):
        start_stack(stack.directory, log_dir=stack.log_dir, ports={"mlflow": 1234}, announce=said.append)


def test_killed_service_is_reported_and_restarted_with_its_data(stack):
    def ask(path, body):
        request = urllib.request.Request(f"{stack.env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/{path}")
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", basic_authorization(":".join(stack.mlflow_login)))
        with urllib.request.urlopen(request, json.dumps(body).encode(), timeout=120) as reply:
            return json.load(reply)

    ask("experiments/create", {"name": "kept"})
    before = service(stack.directory, "mlflow")
    top = psutil.Process(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: not is_running(top), awaited="MLflow was not killed")
    assert service(stack.directory, "mlflow").state != "up"  # at once, not only after the next check of the supervisor
    eventually(lambda: service(stack.directory, "mlflow").state == "up", awaited="MLflow was not restarted")
    after = service(stack.directory, "mlflow")
    assert (after.restarts, after.ports, after.url) == (before.restarts + 1, before.ports, before.url)
    assert "kept" in [e["name"] for e in ask("experiments/search", {"max_results": 10})["experiments"]]
    assert re.search(r"mlflow ended with code -9: .+", (stack.log_dir / "stack.log").read_text())
    wait_until_all_work(stack.directory, ALL)


@pytest.mark.long
def test_what_survives_a_killed_process_of_a_service_is_ended_and_gives_up_its_port(start_services):
    """The job server of Ray survives `ray start`, and listens."""
    directory = start_services("s3", "ray")
    before = service(directory, "ray")
    top = psutil.Process(before.pid)
    listening = {process for process in top.children(recursive=True) if process.net_connections("tcp")}
    assert listening
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: service(directory, "ray").restarts == 1, 600, "Ray was not started again")
    eventually(lambda: service(directory, "ray").state == "up", 600, "Ray does not work again")
    assert not [process for process in listening if is_running(process)]
    after = service(directory, "ray")
    assert (after.restarts, after.ports, after.url) == (before.restarts + 1, before.ports, before.url)


def test_restart_and_stop_keep_ports_secrets_and_data(start_services):
    directory = start_services()
    before, sentinel = service(directory, "s3"), (directory / "sentinel").read_bytes()
    restart_service(directory, "s3")
    after = service(directory, "s3")
    assert after.pid != before.pid
    assert after.ports == before.ports
    wait_until_all_work(directory)
    assert (directory / "sentinel").read_bytes() == sentinel
    with pytest.raises(ValueError, match=r"'s4' is not a service of the stack\. The services are s3, mlflow"):
        restart_service(directory, "s4")
    with pytest.raises(RuntimeError, match="ray is not part of the stack"):
        restart_service(directory, "ray")
    env = stack_environment(directory)
    assert stop_stack(directory)
    assert processes_of(directory) == set()
    assert find_stack(directory) is None
    assert not stop_stack(directory)
    assert stack_environment(start_services()) == env
    wait_until_all_work(directory)  # the check reads what was stored before


def test_concurrent_starts_create_one_stack_which_ends_when_its_folder_is_removed(start_services):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: start_services(), range(2)))
    directory = start_services()
    running = processes_of(directory)
    assert len([process for process in running if "vitline.infra.local.supervisor" in process.cmdline()]) == 1
    shutil.rmtree(directory)
    eventually(
        lambda: not any(is_running(process) for process in running), awaited="the stack still runs without its folder"
    )


def test_stop_removes_everything_after_the_supervisor_was_killed(start_services):
    directory = start_services()
    config, state, store = load_stack_config(directory), find_stack(directory), service(directory, "s3")
    os.kill(store.pid, signal.SIGSTOP)  # so that it cannot end by itself
    os.kill(state.supervisor_pid, signal.SIGKILL)
    eventually(lambda: find_stack(directory) is None, awaited="the stack is still reported as running")
    unrelated = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        # The process id of an ended process may belong to another one by now.
        recorded = json.loads((directory / "processes.json").read_text())
        recorded[str(unrelated.pid)] = birth_of(os.getpid())
        (directory / "processes.json").write_text(json.dumps(recorded))
        assert stop_stack(directory)
        assert not psutil.pid_exists(store.pid) or psutil.Process(store.pid).status() == psutil.STATUS_ZOMBIE
        assert processes_of(directory) == set()
        assert not config.folder.exists()
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


STARTER = """
import pathlib, signal, sys
from vitline.infra.local.stack import start_stack
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = pathlib.Path(sys.argv[1])
start_stack(folder / "stack", log_dir=folder / "logs", services=("s3", "mlflow"), announce=lambda t: print(t, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_start_leaves_nothing_running(tmp_path, number):
    prepare_stack_config(tmp_path / "stack", own_ports())
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        while "s3 is up" not in starter.stdout.readline():
            assert starter.poll() is None
        starter.send_signal(number)
    eventually(lambda: not processes_of(tmp_path / "stack"), awaited="processes of the stack are left")
    assert not (tmp_path / "stack" / "stack.json").exists()
    assert not load_stack_config(tmp_path / "stack").folder.exists()


def test_error_of_a_service_that_does_not_start_quotes_its_log(tmp_path):
    config, _ = prepare_stack_config(tmp_path / "stack", own_ports())
    (config.directory / "mlflow").mkdir()
    (config.directory / "mlflow" / "mlflow.db").write_bytes(b"no database" * 1000)
    with pytest.raises(
        RuntimeError, match=r"(?s)mlflow ended with code 1:.*file is not a database.*See the logs in .*logs"
    ):
        start_stack(config.directory, log_dir=tmp_path / "logs", services=("s3", "mlflow"), announce=lambda text: None)
    assert processes_of(config.directory) == set()


HELD_PORT = """
import pathlib, socket, sys, time
from vitline.infra.local import supervisor
from vitline.infra.local.stack_config import prepare_stack_config
from vitline.infra.local.services import Program

place, _ = prepare_stack_config(pathlib.Path(sys.argv[1]), {})
place.folder.mkdir()  # as the start of a supervisor does
keeper = supervisor.Supervisor(place, place.directory, ["mlflow"])
listen = "import socket, time; held = socket.create_server(('127.0.0.1', %d)); time.sleep(1000)" % place.ports["mlflow"]
command = [sys.executable, "-c", "import time; time.sleep(1000)"]
running = keeper.running["mlflow"]
running.program = Program("mlflow", lambda place: command, lambda place, since: "", lambda place: {})
with socket.create_server(("127.0.0.1", place.ports["mlflow"])):  # as a process left over from an earlier start would
    keeper._step(first=False)
    while running.problem == "starting":
        time.sleep(0.01)
    keeper._step(first=False)
    print(running.state, running.problem)
command[2] = listen
keeper._restart(running)
while running.state != "up":
    keeper._step(first=False)
print(running.state)
keeper._clear(running)
place.folder.rmdir()
"""


def test_service_is_up_only_if_its_own_process_answers(tmp_path):
    prepare_stack_config(tmp_path / "s", own_ports())
    done = subprocess.run(
        [sys.executable, "-c", HELD_PORT, str(tmp_path / "s")], capture_output=True, text=True, timeout=240
    )
    lines = done.stdout.splitlines()
    assert [line.split(" on port")[0] for line in lines] == [
        "starting a process that does not belong to mlflow answers",
        "up",
    ], done


ALWAYS_FAILING = """
import sys, pathlib
from vitline.infra.local import supervisor
from vitline.infra.local.stack_config import prepare_stack_config
from vitline.infra.local.services import Program

supervisor._FIRST_WAIT_S = 0.01
place, _ = prepare_stack_config(pathlib.Path(sys.argv[1]), {})
place.folder.mkdir()  # as the start of a supervisor does
keeper = supervisor.Supervisor(place, place.directory, ["s3"])
command = [sys.executable, "-c", "print('out of space'); raise SystemExit(3)"]
running = keeper.running["s3"]
running.program = Program("s3", lambda place: command, lambda place, since: "not yet", lambda place: {})
while running.state != "failed":
    keeper._step(first=False)
print(running.restarts, running.problem)
place.folder.rmdir()
"""


def test_service_that_keeps_failing_is_not_restarted_any_more(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ALWAYS_FAILING, str(tmp_path / "s")], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.startswith("6 ended with code 3: out of space\n"), done.stderr
    assert "died 7 times" in done.stderr


def test_port_in_use_is_replaced_or_refused_if_requested(tmp_path):
    prepare_stack_config(tmp_path, own_ports())
    before = load_stack_config(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before.ports["mlflow"]))
        taken.listen()
        after, notes = prepare_stack_config(tmp_path, {})
        assert {k for k in after.ports if after.ports[k] != before.ports[k]} == {"mlflow"}
        assert f"mlflow: port {before.ports['mlflow']} is in use, so it listens on {after.ports['mlflow']}" in notes
        with pytest.raises(ValueError, match=r"--ray-port=\d+: that port is in use\. Choose another one"):
            prepare_stack_config(tmp_path, {"ray": before.ports["mlflow"]})
    with pytest.raises(ValueError, match="--s3-port=60000: must be from 1024 to 55535"):
        prepare_stack_config(tmp_path, {"s3": 60_000})


def test_folder_without_a_stack_is_reported_and_left_unchanged(tmp_path):
    assert find_stack(tmp_path / "none") is None
    assert not stop_stack(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError, match=r"there is no stack in .*none.*`vitline stack up`"):
        stack_environment(tmp_path / "none")
    Path(tmp_path / "stack-config.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"stack-config\.json does not fit this version"):
        stack_environment(tmp_path)
