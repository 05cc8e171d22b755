"""The local stack of a folder, as every process that is started there finds it: commands, and Python that loads a model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infra.local.paths import local_dir
from infra.settings import Settings, joined_environment

if TYPE_CHECKING:
    from infra.local.stack_config import StackConfig

# What a process has of another store, or another cluster, would not open this one.
FOREIGN = ("AWS_", "RAY_AUTH_")


def stack_dir(settings: Settings) -> Path:
    """Where the stack of this folder keeps its things."""
    return local_dir(settings) / "stack"


def find_running_stack(settings: Settings) -> Path | None:
    """The folder of the local stack, running or not, that this process is to use; None where the environment names a
    cluster or a store that the stack does not serve, and where there never was a stack."""
    directory = stack_dir(settings)
    if "ray_address" in settings.model_fields_set or not (directory / "place.json").exists():
        return None
    if "root" in settings.model_fields_set:
        from infra.local.stack_config import load_stack_config, plain_root

        config = load_stack_config(directory)
        return directory if config and config.root == plain_root(settings.root) else None
    return directory


def foreign_to(config: "StackConfig | None") -> tuple[str, ...]:
    """How variables begin that would not open this stack: but for a store that it only serves, credentials are in them."""
    return ("RAY_AUTH_",) if config and config.root else FOREIGN


def stopped_message(directory: Path) -> str:
    """What to say of a stack whose store cannot be read."""
    return f"the local stack in {directory} is down, and its store cannot be seen; `vitline stack up` starts it"


@contextlib.contextmanager
def local_store() -> Iterator[tuple[str, str]]:
    """The root that this process is to read, and what to add where something is missing there (empty, or that the stack is
    down).

    Inside, the environment has the credentials of the stack's store; afterwards it is as it was.
    """
    settings = Settings()
    directory = find_running_stack(settings)
    if directory is None:
        yield settings.root, ""
        return
    from infra.local.stack import find_stack
    from infra.local.stack_config import load_stack_config

    config = load_stack_config(directory)
    if config is None or (config.object_store and not find_stack(directory)):
        yield settings.root, f" And {stopped_message(directory)}."
        return
    with joined_environment(config.environment(), instead_of=foreign_to(config)):
        yield Settings().root, ""
