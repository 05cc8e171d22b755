"""A stack beside servers of the user's own: what it starts, and which addresses and logins its processes get."""

import re
import socket
from pathlib import Path

import pytest

from vitline.flows.ops import own_servers
from vitline.flows.ops.own_servers import refuse_work_pool
from vitline.flows.ops.service_checks import Reply
from vitline.infra.local.running_stack import find_running_stack, foreign_to
from vitline.infra.local.services import links, programs
from vitline.infra.local.stack_config import ALL, StackConfig, foreign_servers, prepare_stack_config
from vitline.infra.settings import Settings

OWN = {"prefect": "https://prefect:4200/api", "mlflow": "https://mlflow:5000", "ray": "https://ray:8265"}
VARIABLES = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI", "ray": "RAY_ADDRESS"}
# What a process sends to a server; each is only for a server of the stack.
OF_THE_STACK = {
    "prefect": ("PREFECT_API_AUTH_STRING", "PREFECT_HOME"),
    "mlflow": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "ray": ("RAY_AUTH_TOKEN_PATH", "VITLINE_JOB_PYTHON"),
}


def beside(folder: Path, *own: str) -> StackConfig:
    foreign = {name: OWN[name] for name in own}
    return prepare_stack_config(folder / "stack", {}, str(folder / "store"), foreign=foreign)[0]


@pytest.mark.parametrize(
    ("own", "started"),
    [
        ((), "mlflow sender prefect prefect-worker ray"),
        (("mlflow",), "sender prefect prefect-worker ray"),
        (("prefect",), "mlflow sender prefect-worker ray"),
        (("ray",), "mlflow sender prefect prefect-worker"),
        (("prefect", "mlflow"), "sender prefect-worker ray"),
        (("prefect", "mlflow", "ray"), "sender prefect-worker"),
    ],
)
def test_only_what_is_missing_is_started_and_gets_the_addresses_of_the_others(
    tmp_path: Path, own: tuple[str, ...], started: str
) -> None:
    config = beside(tmp_path, *own)
    assert [name for name in ALL if config.starts(name)] == started.split()
    env = config.environment()
    for name, variable in VARIABLES.items():
        assert (env[variable] == OWN[name]) == (name in own)
        assert {each in env for each in OF_THE_STACK[name]} == {name not in own}
    assert len(links(config)) == 3 - len(own)
    assert not [address for address in OWN.values() if address in str(links(config))]


def test_logins_of_own_servers_reach_their_clients_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"PREFECT_API_KEY": "a", "MLFLOW_TRACKING_TOKEN": "b", "RAY_AUTH_TOKEN": "c"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    config = beside(tmp_path, *OWN)
    (tmp_path / "other").mkdir()
    whole = beside(tmp_path / "other")

    def given(program: str, config: StackConfig) -> set[str]:
        return theirs.keys() & programs()[program].full_environment(config).keys()

    assert given("prefect-worker", config) == theirs.keys()
    assert given("sender", config) == {"MLFLOW_TRACKING_TOKEN"}
    assert not given("prefect-worker", whole) | given("sender", whole)
    assert not given("prefect", beside(tmp_path, "mlflow")) | given("mlflow", beside(tmp_path, "prefect"))
    assert (foreign_to(config), foreign_to(whole)) == ((), ("RAY_AUTH_",))


def test_the_addresses_of_a_stack_itself_are_no_servers_of_the_user(tmp_path: Path) -> None:
    config = beside(tmp_path, "prefect")
    ours = {"mlflow": config.url("mlflow").replace("127.0.0.1", "localhost"), "ray": config.url("ray")}
    assert foreign_servers(config, {**ours, "prefect": OWN["prefect"]}, running=True) == {"prefect": OWN["prefect"]}
    with socket.create_server(("127.0.0.1", config.ports["mlflow"])):  # the user's own, while the stack is down
        assert foreign_servers(config, ours, running=False) == {"mlflow": ours["mlflow"]}


def test_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^RAY_ADDRESS is https://ray:8265, whose nodes cannot reach a store of the stack"
    ):
        prepare_stack_config(tmp_path / "a", {}, foreign={"ray": OWN["ray"]})
    with pytest.raises(
        ValueError, match=r"--mlflow-port=4000: this stack uses https://mlflow:5000 and has no mlflow of"
    ):
        prepare_stack_config(tmp_path / "a", {"mlflow": 4000}, foreign=OWN)
    with pytest.raises(ValueError, match="The address of mlflow has a user or password") as refused:
        prepare_stack_config(tmp_path / "a", {}, foreign={"mlflow": "https://ada:hidden@mlflow"})
    assert "hidden" not in str(refused.value)


def test_commands_join_a_stack_that_uses_their_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = beside(tmp_path, "ray")
    monkeypatch.delenv("VITLINE_ROOT")
    monkeypatch.setenv("VITLINE_HOME", str(tmp_path))
    for address, joined in ((OWN["ray"], config.directory), ("http://other:8265", None)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert find_running_stack(Settings()) == joined


@pytest.mark.parametrize(
    ("pool", "workers", "problem"),
    [
        (None, "", None),
        ("process", '[{"name": "NAME", "status": "ONLINE"}, {"name": "other", "status": "OFFLINE"}]', None),
        ("kubernetes", "[]", r"The work pool 'vitline' of your Prefect is for kubernetes, .* Set VITLINE_PROJECT"),
        ("process", '[{"name": "b", "status": "ONLINE"}]', "The worker b serves the work pool 'vitline' .* VITLINE_PROJECT"),
    ],
)  # fmt: skip
def test_a_work_pool_that_others_serve_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str | None, workers: str, problem: str | None
) -> None:
    config = prepare_stack_config(tmp_path, {}, foreign={"prefect": OWN["prefect"]})[0]
    workers = workers.replace("NAME", f"vitline-local-{config.id}")

    def ask(url: str, *_: object) -> Reply:
        text = workers if url.endswith("/workers/filter") else f'{{"type": "{pool}"}}'
        return Reply(404 if pool is None else 200, text, None, 0)

    monkeypatch.setattr(own_servers, "ask", ask)
    if problem is None:
        refuse_work_pool(config, {})
    else:
        with pytest.raises(ValueError, match=re.compile(problem)):
            refuse_work_pool(config, {})
