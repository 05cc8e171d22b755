"""The local stack with its real servers: what it promises while it runs, when something is killed, and at its end."""

import json
import re
import stat

import pytest

from infra.local.stack import find_stack, listeners, memory_bytes, start_stack


def test_everything_is_up_and_only_ray_listens_beyond_loopback(stack):
    state = find_stack(stack.directory)
    assert {s.name: (s.state, s.restarts, s.problem) for s in state.services} == {
        name: ("up", 0, "") for name in ("s3", "mlflow", "prefect", "prefect-worker", "ray")
    }
    found = listeners(stack.directory)
    assert {listener.service for listener in found if not listener.loopback} <= {"ray"}
    there = {listener.port for listener in found}
    assert all(set(service.ports) <= there for service in state.services)
    assert all(size > 10_000_000 for size in memory_bytes(stack.directory).values())


def test_secrets_are_in_files_of_their_own_and_nowhere_else(stack):
    token = (stack.directory / "ray-token").read_text()
    secrets = [token, stack.env["AWS_SECRET_ACCESS_KEY"]]
    kept = {stack.directory / "ray-token", stack.directory / "credentials.json"}
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(stack.directory.stat().st_mode) == 0o700
    readable = [*stack.log_dir.rglob("*.log*"), *stack.directory.rglob("*.json"), *stack.directory.rglob("*.db")]
    readable += [stack.directory / "s3" / "mini.options"]
    assert len(readable) > 8
    for path in {p for p in readable if p.is_file()} - kept:
        text = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in text], path
    assert not any(secret in json.dumps(find_stack(stack.directory).model_dump()) for secret in secrets)


def test_a_second_start_finds_the_first(stack):
    said = []
    before = find_stack(stack.directory)
    assert start_stack(stack.directory, log_dir=stack.log_dir, announce=said.append) == before
    assert said == ["the stack is up already"]
    with pytest.raises(RuntimeError, match=re.compile(r"mlflow runs on port \d+, not 1234.*`vitline stack down`")):
        start_stack(stack.directory, log_dir=stack.log_dir, ports={"mlflow": 1234}, announce=said.append)
