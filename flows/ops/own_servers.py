"""What a local stack uses in place of servers of its own: a Prefect, an MLflow, a Ray or a store of the user's. Whether each answers,
and whether the stack may work beside it."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vitline.flows.ops.check import Check
from vitline.flows.ops.service_checks import ask, check_job_server, check_mlflow, check_prefect, check_store
from vitline.infra.local.running_stack import foreign_to
from vitline.infra.local.services import worker_name
from vitline.infra.local.stack_config import StackConfig
from vitline.infra.settings import Settings, joined_environment

CHECKS: dict[str, Callable[[Settings], Check]] = {
    "store": check_store,
    "prefect": check_prefect,
    "mlflow": check_mlflow,
    "ray": check_job_server,
}


class OwnServer(NamedTuple):
    """A server, or store, of the user's own that a stack uses."""

    name: str
    address: str
    check: Check

    @property
    def line(self) -> str:
        """`prefect: yours, at https://prefect.example.org/api, answers`, or what is wrong and what to do."""
        answers = "answers" if self.check.ok else f"cannot be used: {self.check.found}. {self.check.advice}"
        return f"{self.name}: yours, at {self.address}, {answers}"


def examine_own(config: StackConfig) -> list[OwnServer]:
    """What the stack uses of the user's own, with the result of its check, whose requests have short timeouts."""
    own = ({"store": config.root} if config.root else {}) | config.foreign
    with joined_environment(config.environment(), instead_of=foreign_to(config)):
        settings = Settings()
        with ThreadPoolExecutor(len(CHECKS)) as pool:
            checks = dict(zip(own, pool.map(lambda name: CHECKS[name](settings), own), strict=True))
    return [OwnServer(name, own[name], check) for name, check in checks.items()]


def refuse_unusable(config: StackConfig, check_registered: Callable[[Settings], object]) -> None:
    """Before anything of the stack is started: raises RuntimeError for what does not answer, and ValueError for a Prefect where the
    stack's worker would run flows of others, or where `check_registered` finds that `vitline flows deploy` would be refused."""
    for own in examine_own(config):
        if not own.check.ok:
            raise RuntimeError(own.line)
    if config.starts("prefect"):
        return
    with joined_environment(config.environment(), instead_of=foreign_to(config)):
        refuse_work_pool(config, Settings().prefect_headers())
        check_registered(Settings())


def refuse_work_pool(config: StackConfig, headers: Mapping[str, str]) -> None:
    """Raises ValueError for a work pool, named after the project, that another worker serves: a store of the stack is on this machine."""
    pool = f"{config.address('prefect')}/work_pools/{config.project}"
    found = ask(pool, headers)
    if found.status == 404:  # the worker creates it
        return
    advice = "Set VITLINE_PROJECT to another name, for a work pool and deployments of their own."
    kind = json.loads(found.text)["type"]
    if kind != "process":
        raise ValueError(f"The work pool {config.project!r} of your Prefect is for {kind}, not for processes. {advice}")
    others = [w["name"] for w in json.loads(ask(f"{pool}/workers/filter", headers, {}).text) if w["status"] == "ONLINE"]
    if config.root is None and (others := [name for name in others if name != worker_name(config)]):
        raise ValueError(
            f"The worker {others[0]} serves the work pool {config.project!r} of your Prefect, and may not reach the store of this stack. "
            f"{advice}"
        )
