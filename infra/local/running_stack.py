"""Finds the local stack that belongs to the current folder, for commands and for Python code that loads a model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vitline.infra.local.paths import local_dir
from vitline.infra.settings import Settings, joined_environment
from vitline.infra.settings_file import file_variables

if TYPE_CHECKING:
    from vitline.infra.local.stack_config import StackConfig


def stack_dir(settings: Settings) -> Path:
    """The folder of the local stack."""
    return local_dir(settings) / "stack"


def find_running_stack(settings: Settings) -> Path | None:
    """The folder of the local stack, running or not, that this process should use.

    None if there never was a stack, or if the environment names a cluster or a store that the stack does not serve.
    """
    directory = stack_dir(settings)
    if not (directory / "stack-config.json").exists():
        return None
    from vitline.infra.local.stack_config import load_stack_config, normalized_root

    config = load_stack_config(directory)
    assert config
    wanted = settings.model_fields_set
    if "ray_address" in wanted and config.foreign.get("ray") != settings.ray_address:
        return None
    return None if "root" in wanted and config.root != normalized_root(settings.root) else directory


def foreign_to(config: "StackConfig | None") -> tuple[str, ...]:
    """Prefixes of variables that may belong to another store or cluster, to remove before the environment of the stack is set.

    A stack that uses an existing store, or a Ray of the user's own, does so with the credentials of the environment: they stay.
    """
    kept = {"AWS_": config and config.root, "RAY_AUTH_": config and config.foreign.get("ray")}
    return tuple(prefix for prefix, of_the_user in kept.items() if not of_the_user)


def stopped_message(directory: Path) -> str:
    """The message for a stack that is down, so that its store cannot be read."""
    return f"the local stack in {directory} is down, so its store cannot be read; `vitline stack up` starts it"


@contextlib.contextmanager
def local_store() -> Iterator[tuple[str, str]]:
    """The root that this process should read, and text to append to an error if something is missing there.

    The text is empty, or says that the stack is down. While the context is open, the environment has the credentials of
    the stack's store; afterwards it is restored.
    """
    with joined_environment(file_variables()[0]), _store_of(Settings()) as found:
        yield found


@contextlib.contextmanager
def _store_of(settings: Settings) -> Iterator[tuple[str, str]]:
    directory = find_running_stack(settings)
    if directory is None:
        yield settings.root, ""
        return
    from vitline.infra.local.stack import find_stack
    from vitline.infra.local.stack_config import load_stack_config

    config = load_stack_config(directory)
    if config is None or (config.object_store and not find_stack(directory)):
        yield settings.root, f" Note that {stopped_message(directory)}."
        return
    with joined_environment(config.environment(), instead_of=foreign_to(config)):
        yield Settings().root, ""
