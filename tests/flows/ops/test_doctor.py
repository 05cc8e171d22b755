"""The doctor on a healthy machine, and with real faults of services and settings."""

import itertools
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import PREFECT_API_SSL_CERT_FILE, temporary_settings

from vitline.flows.catalog.registered_by import REMEMBERED
from vitline.flows.ops import check as checks_module
from vitline.flows.ops import doctor, flow_run_checks, node_checks, service_checks
from vitline.flows.ops.doctor import examine
from vitline.infra.local import processes
from vitline.infra.local.access.mutual_tls import make_certificates
from vitline.infra.local.stack import Listener, find_stack, listeners
from vitline.infra.local.stack_config import ALL
from vitline.infra.settings import Settings, joined_environment, variables_of
from vitline.infra.storage import open_store
from vitline.infra.stores import s3_store

NAMES = [
    "settings",
    "python",
    "packages",
    "seaweedfs",
    "memory",
    "disk",
    "ports",
    "store",
    "clock",
    "ray",
    "prefect",
    "pools",
    "schedules",
    "mlflow",
    "logs",
    "certificates",
    "accelerator",
    "decoder",
    "native decoder",
]


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch):
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 10**6)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 10**6)
    monkeypatch.setattr(checks_module, "DEADLINE_S", 240.0)
    s3_store._filesystem.cache_clear()  # its clients keep their credentials


@pytest.fixture
def settings_of(monkeypatch, tmp_path):
    """settings_of(root, ...): settings without this shell's environment, and a temporary folder that Ray can use."""
    for field in Settings.model_fields:
        for name in variables_of(field):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: "/tmp")

    def make(root=None, **changes) -> Settings:
        return Settings(root=str(root or tmp_path / "store"), **changes)

    return make


@pytest.fixture
def on_stack(stack, settings_of, monkeypatch):
    """on_stack(...): settings of the real servers, with changes."""
    for name, value in stack.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "local_dir", lambda settings: stack.directory.parent)
    monkeypatch.setattr(service_checks, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(node_checks, "TIMEOUT_S", 60.0)

    def make(**changes) -> Settings:
        fields = {
            "root": stack.env["VITLINE_ROOT"],
            "ray_address": stack.env["RAY_ADDRESS"],
            "ray_auth_token_path": stack.env["RAY_AUTH_TOKEN_PATH"],
            "prefect_api_url": stack.env["PREFECT_API_URL"],
            "prefect_api_auth_string": stack.env["PREFECT_API_AUTH_STRING"],
            "mlflow_tracking_uri": stack.env["MLFLOW_TRACKING_URI"],
            "mlflow_tracking_username": stack.env["MLFLOW_TRACKING_USERNAME"],
            "mlflow_tracking_password": stack.env["MLFLOW_TRACKING_PASSWORD"],
        }
        return settings_of(**fields | changes)

    return make


def by_name(settings):
    return {check.name: check for check in examine(settings)}


def failure(check, found, advice):
    """Asserts that a check failed with these texts."""
    assert not check.ok
    assert found in check.found, check
    assert advice in check.advice, check


@contextmanager
def answering(answers, ahead_s=0.0, tls=None):
    """A server with replies (status, text) by path; any other path is a 404. Its clock is `ahead_s` ahead. `tls`: the files of its
    certificate and key."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            self.do_GET()

        def do_GET(self):
            status, text = answers.get(self.path.split("?")[0], (404, "nothing here"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp=None):
            return super().date_time_string(time.time() + ahead_s)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def silent():
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def closed():
    """A port that no process listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def machine(monkeypatch, *, busy):
    """This machine, with a load that is low or high."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (1000.0 if busy else 0.0, 0.0, 0.0))
        yield


def test_this_machine_passes_and_nothing_is_left_in_the_store(settings_of, tmp_path):
    checks = by_name(settings_of())
    # A source tree on PYTHONPATH has no metadata; `make install` gives it.
    assert {name for name, check in checks.items() if not check.ok} <= {"packages"}
    assert list(checks) == NAMES
    assert list(open_store(tmp_path / "store").list()) == []


def test_the_real_servers_pass(on_stack, stack):
    before = {*listeners(stack.directory)}
    checks = by_name(on_stack())
    assert [check for check in checks.values() if not check.ok and check.name != "packages"] == []
    assert checks["clock"].found.endswith("Prefect, MLflow, Ray")
    assert "store: the same as" in checks["nodes"].found
    for service in find_stack(stack.directory).services:
        assert service.name in ALL
        assert not service.ports or str(service.ports[0]) in checks["ports"].found
    for listener in before & {*listeners(stack.directory)}:  # processes of Ray come and go
        if not listener.loopback:
            assert re.search(
                rf"ray also on {re.escape(listener.reach)}: [\d, ]*\b{listener.port}\b", checks["ports"].found
            )
    assert open_store(on_stack().root).list("doctor") == []


@pytest.mark.parametrize("broken", [closed, silent])
def test_services_that_are_down_or_hang_are_named(settings_of, monkeypatch, broken):
    monkeypatch.setattr(service_checks, "TIMEOUT_S", 0.3)
    with broken() as url, machine(monkeypatch, busy=False):
        away = settings_of(
            root="s3://bucket/x", s3_endpoint_url=url, ray_address=url, prefect_api_url=url, mlflow_tracking_uri=url
        )
        checks = by_name(away)
    variables = {"store": "AWS_ENDPOINT_URL", "ray": "RAY_ADDRESS", "prefect": "PREFECT_API_URL"}
    for name, variable in (variables | {"mlflow": "MLFLOW_TRACKING_URI"}).items():
        failure(checks[name], url, variable)
        assert "does not answer" in checks[name].found
    assert checks["memory"].ok
    assert checks["clock"].ok  # the clock is not at fault


def test_a_check_that_does_not_return_in_time_is_a_failure(settings_of, monkeypatch):
    monkeypatch.setattr(checks_module, "DEADLINE_S", 0.5)
    over = threading.Event()
    monkeypatch.setattr(service_checks, "check_store", lambda settings: over.wait(60))
    with machine(monkeypatch, busy=False):
        failure(by_name(settings_of())["store"], "s, though this machine is not busy", "firewall")
    with machine(monkeypatch, busy=True):
        failure(by_name(settings_of())["store"], "and this machine is busy: load", "when the machine is less busy")
    over.set()


def test_a_slow_service_on_a_busy_machine_gets_other_advice(settings_of, monkeypatch):
    monkeypatch.setattr(service_checks, "TIMEOUT_S", 0.1)
    with silent() as url, machine(monkeypatch, busy=True):
        check = service_checks.check_prefect(settings_of(prefect_api_url=url))
        failure(check, "and this machine is busy: load", "when the machine is less busy")
    with closed() as url, machine(monkeypatch, busy=True):  # a refused connection is not slow
        failure(service_checks.check_prefect(settings_of(prefect_api_url=url)), "does not answer", "PREFECT_API_URL")


def test_a_wrong_token_is_named(on_stack, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    settings = on_stack(ray_auth_token_path=tmp_path / "token")
    failure(service_checks.check_job_server(settings), "Invalid authentication token", "RAY_AUTH_TOKEN_PATH")
    settings = on_stack(ray_auth_token_path=tmp_path / "absent")
    failure(service_checks.check_job_server(settings), "absent", "RAY_AUTH_TOKEN_PATH")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_wrong_credentials_name_the_variable(on_stack, monkeypatch, tmp_path, changes, advice):
    settings = on_stack()
    if not settings.root.startswith("s3://"):
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    failure(service_checks.check_store(settings), "cannot list", advice)


def test_a_missing_bucket_is_named(on_stack):
    settings = on_stack()
    if not settings.root.startswith("s3://"):
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    check = service_checks.check_store(on_stack(root="s3://no-such-bucket/x"))
    failure(check, "no-such-bucket", "VITLINE_ROOT")


def test_a_key_without_permission_gets_the_permission_named(settings_of, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    denied = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    with answering({"/bucket": (403, denied)}) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        check = service_checks.check_store(settings_of("s3://bucket/x", s3_endpoint_url=url))
    failure(check, "cannot list", "s3:ListBucket")


@pytest.mark.s3
def test_a_proxy_that_ignores_ranges_is_named(settings_of, proxy, s3_uri):  # settings_of unsets what the proxy sets
    settings = settings_of(s3_uri, s3_endpoint_url=proxy.url)
    assert service_checks.check_store(settings).ok
    proxy.range_faults = itertools.repeat("ignored")
    failure(service_checks.check_store(settings), "cannot read a range", "header Range")


def test_a_host_that_mlflow_refuses_gets_the_option_named(on_stack, stack):
    port = stack.env["MLFLOW_TRACKING_URI"].rsplit(":", 1)[1]
    check = service_checks.check_mlflow(on_stack(mlflow_tracking_uri=f"http://127.1:{port}"))
    failure(check, "Invalid Host header", f"--allowed-hosts '127.1:{port}'")


@pytest.mark.parametrize(
    ("check", "field", "answers", "found", "advice"),
    [
        ("prefect", "prefect_api_url", {"/admin/version": (200, '"2.20.1"')}, "server 2.20.1", "prefect==2.20.1"),
        ("prefect", "prefect_api_url", {"/admin/version": (401, "no")}, "refuses access", "PREFECT_API_AUTH_STRING"),
        ("prefect", "prefect_api_url", {"/admin/version": (200, "<html>")}, "is not a Prefect server", "/api"),
        ("job_server", "ray_address", {"/api/version": (200, '{"ray_version": "2.9.0"}')}, "Ray 2.9.0", "ray==2.9.0"),
        ("job_server", "ray_address", {}, "is not a Ray job server", "RAY_ADDRESS"),
        ("mlflow", "mlflow_tracking_uri", {}, "is not an MLflow server", "MLFLOW_TRACKING_URI"),
        (
            "mlflow",
            "mlflow_tracking_uri",
            {"/api/2.0/mlflow/experiments/search": (401, "who are you")},
            "refuses access",
            "MLFLOW_TRACKING_USERNAME",
        ),
        (
            "mlflow",
            "mlflow_tracking_uri",
            {"/api/2.0/mlflow/experiments/search": (200, json.dumps({"experiments": []})), "/version": (200, "1.2.3")},
            "server 1.2.3",
            "mlflow==1.2.3",
        ),
    ],
)
def test_other_versions_and_other_servers_are_named(settings_of, check, field, answers, found, advice):
    with answering(answers) as url:
        failure(getattr(service_checks, f"check_{check}")(settings_of(**{field: url})), found, advice)


@pytest.mark.parametrize(("status", "says"), [("NOT_READY", "has no worker"), ("PAUSED", "is paused")])
def test_a_pool_that_starts_nothing_is_named_and_not_tried(settings_of, status, says):
    deployment = {"name": "default", "work_pool_name": "gpu", "job_variables": {}}
    pool = {"name": "gpu", "type": "kubernetes", "status": status, "is_paused": status == "PAUSED"}
    form = {"parameter_openapi_schema": {REMEMBERED: {}}}
    replies = {"/deployments/filter": [deployment | form, deployment | {"parameter_openapi_schema": {}}]}
    replies["/work_pools/filter"] = [pool]
    with answering({path: (200, json.dumps(reply)) for path, reply in replies.items()}) as url:
        (check,) = flow_run_checks.check_pools(settings_of(prefect_api_url=url))
    assert not check.ok
    assert f"gpu (kubernetes) {says}" in check.found
    assert ("prefect worker start --pool gpu" in check.advice) == (status == "NOT_READY")


@pytest.mark.slow
def test_each_service_is_asked_by_its_own_client_with_the_certificates_that_it_reads(
    settings_of, monkeypatch, tmp_path
):
    authority, *tls = make_certificates(tmp_path)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    answers = {
        "/api/2.0/mlflow/experiments/search": (200, json.dumps({"experiments": []})),
        "/version": (200, service_checks.installed("mlflow")),
        "/admin/version": (200, json.dumps(service_checks.installed("prefect"))),
        "/bucket": (403, ""),
    }
    for name, value in {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # A process keeps its connections to a store, so each time a store of its own.
    for variables, trusted in [({"SSL_CERT_FILE": str(authority)}, False), ({"VITLINE_CA": str(authority)}, True)]:
        with answering(answers, tls=tls) as url, joined_environment({**variables, "AWS_ENDPOINT_URL": url}):
            mlflow = service_checks.check_mlflow(settings_of(mlflow_tracking_uri=url))
            store = service_checks.check_store(settings_of("s3://bucket/x", s3_endpoint_url=url))
            # Prefect reads the variable once in a process, which may have been in an earlier test.
            with temporary_settings({PREFECT_API_SSL_CERT_FILE: os.environ["SSL_CERT_FILE"]}):
                assert service_checks.check_prefect(settings_of(prefect_api_url=url)).ok
        if trusted:
            assert mlflow.ok
            failure(store, "Forbidden", "grant the key")
        else:
            failure(mlflow, "certificate verify failed", "Set VITLINE_CA")
            failure(store, "at attempt 1", "Set VITLINE_CA")


def test_a_job_python_that_cannot_run_jobs_is_named(on_stack, tmp_path):
    for python, says in [
        (str(tmp_path / "python"), "cannot be run"),
        (f"{sys.base_prefix}/bin/python3", "has no "),  # vitline, or where PYTHONPATH has it, what it needs
    ]:
        (check,) = node_checks.check_cluster(on_stack(job_python=python))
        failure(check, f"a small job failed: {python} {says}", "what the message names")
        assert "VITLINE_JOB_PYTHON" in check.found


@pytest.mark.parametrize(("ahead_s", "says"), [(90, "90 s ahead of"), (-3600, "3600 s behind")])
def test_a_wrong_clock_is_named(settings_of, ahead_s, says):
    with answering({}, ahead_s) as wrong, answering({}) as right:
        check = service_checks.check_clock(settings_of(prefect_api_url=wrong, mlflow_tracking_uri=right))
    assert not check.ok
    assert check.found.startswith("Prefect's clock is ")
    # The header holds whole seconds, so the last digit may differ.
    assert says[-6:] in check.found
    assert "MLflow" not in check.found
    assert "NTP" in check.advice


def test_the_programs_that_hold_the_usual_ports_are_named(settings_of, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "WELL_KNOWN", {"mlflow": port})
        check = doctor.check_ports(settings_of())
    assert f"{port} (mlflow) by " in check.found
    assert f"process {doctor.os.getpid()}" in check.found
    assert (check.mark, "vitline stack up" in check.found) == ("ok", True)


def test_a_service_that_other_machines_can_reach_is_a_failure(on_stack, monkeypatch):
    reached = [Listener("ray", "10.0.0.1", 1), Listener("prefect", "0.0.0.0", 4200), Listener("s3", "127.0.0.1", 8333)]
    monkeypatch.setattr(doctor, "listeners", lambda directory: reached)
    check = doctor.check_ports(on_stack())
    failure(check, "prefect on 0.0.0.0:4200", "vitline stack down")
    assert "10.0.0.1" not in check.found


def test_a_weed_that_does_not_run_is_named(tmp_path, monkeypatch):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho cannot execute binary >&2\nexit 126\n")
    program.chmod(0o755)
    monkeypatch.setattr(doctor, "seaweed_program", lambda: program)
    failure(doctor.check_seaweedfs(), "cannot execute binary", "make install")
    monkeypatch.setattr(doctor, "seaweed_program", lambda: None)
    assert doctor.check_seaweedfs().ok


def test_a_file_in_place_of_the_root_is_named_and_the_other_checks_run(settings_of, tmp_path):
    (tmp_path / "taken").write_text("not a folder")
    checks = by_name(settings_of(tmp_path / "taken"))
    assert not checks["store"].ok
    assert str(tmp_path / "taken") in checks["store"].found
    assert checks["store"].advice
    assert checks["accelerator"].ok
    assert checks["decoder"].ok
    assert checks["ray"].ok


def test_a_store_of_an_unknown_kind_is_named_with_the_known_kinds(settings_of):
    check = by_name(settings_of("ftp://host/x"))["store"]
    assert not check.ok
    assert "ftp://host/x" in check.found
    assert "s3://bucket" in check.found


def test_a_store_without_conditional_writes_fails(settings_of, monkeypatch):
    def overwrites(store, key, data):
        store.write(key, data)
        return store.read_tagged(key)[1]

    monkeypatch.setattr("vitline.infra.stores.file_store.FileStore.create", overwrites)
    failure(by_name(settings_of())["store"], "does not support conditional writes", "Fix")


def test_too_little_memory_and_disk_come_with_advice(settings_of, monkeypatch):
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 10**18)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 10**18)
    checks = by_name(settings_of())
    for name in ("memory", "disk"):
        assert (checks[name].mark, bool(checks[name].advice)) == ("FAIL", True)


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch):
    wanted = [
        "numpy>=999",
        "no-such-package>=1",
        "pydantic>=2",
        "not-for-here; sys_platform == 'nowhere'",
        "nor-this-one; extra == 'half'",
        "psutil>=999; extra == 'half'",
        "pyarrow>=999; extra == 'whole'",
        "elsewhere>=1; sys_platform == 'nowhere' and extra == 'whole'",
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    check = doctor.check_packages()
    assert not check.ok
    for reported in ("numpy", "no-such-package is missing", "pyarrow"):
        assert reported in check.found
    for unreported in ("nor-this-one", "psutil", "pydantic", "not-for-here", "elsewhere"):
        assert unreported not in check.found
    assert "make install" in check.advice


def test_sockets_need_a_folder_with_a_short_path_and_the_fallback_will_do(settings_of, monkeypatch, tmp_path):
    settings = settings_of()
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: "/" + "deep/" * 20)
    check = doctor.check_ray(settings)
    assert (check.ok, check.advice) == (True, "")
    monkeypatch.setattr(processes, "SHORT_FALLBACK", f"{tmp_path}/absent")
    failure(doctor.check_ray(settings), f"{tmp_path}/absent cannot be written to", "TMPDIR")


def test_what_the_decoding_process_lacks_is_said(monkeypatch):
    class Lacking(node_checks.SandboxedDecoder):
        def run(self, images):
            self.lacking = without
            return iter(())

    monkeypatch.setattr(node_checks, "SandboxedDecoder", Lacking)
    without = ("Landlock: Function not implemented",)
    assert "Landlock: Function not implemented" in node_checks.check_decoder().found
    assert node_checks.check_decoder().ok  # the filter alone is enough
    without = ("seccomp: Invalid argument",)
    failure(node_checks.check_decoder(), "seccomp", "Linux 5.13")


def test_which_decoder_trainings_use_is_said(monkeypatch):
    monkeypatch.setattr(node_checks, "native_is_installed", lambda: False)
    absent = node_checks.check_native_decoder()
    assert absent.ok
    assert "not installed" in absent.found
    assert "make install" in absent.found
    monkeypatch.setattr(node_checks, "native_is_installed", lambda: True)
    monkeypatch.setattr(node_checks, "native_problem", lambda: "")
    assert node_checks.check_native_decoder() == (
        "native decoder",
        True,
        "installed; its pixels are equal to those of whole images",
        "",
    )
    monkeypatch.setattr(node_checks, "native_problem", lambda: "other pixels")
    failure(node_checks.check_native_decoder(), "not used here: other pixels", "make install")
