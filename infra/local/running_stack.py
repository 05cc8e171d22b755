"""Finds the local stack that belongs to the current folder, for commands and for Python code that loads a model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vitline.infra.local.paths import local_dir
from vitline.infra.settings import Settings, joined_environment

if TYPE_CHECKING:
    from vitline.infra.local.stack_config import StackConfig

# Variables with these prefixes may belong to another store or cluster, and would not open those of the stack.
FOREIGN = ("AWS_", "RAY_AUTH_")


def stack_dir(settings: Settings) -> Path:
    """The folder of the local stack."""
    return local_dir(settings) / "stack"


def find_running_stack(settings: Settings) -> Path | None:
    """The folder of the local stack, running or not, that this process should use.

    None if there never was a stack, or if the environment names a cluster or a store that the stack does not serve.
    """
    directory = stack_dir(settings)
    if "ray_address" in settings.model_fields_set or not (directory / "stack-config.json").exists():
        return None
    if "root" in settings.model_fields_set:
        from vitline.infra.local.stack_config import load_stack_config, normalized_root

        config = load_stack_config(directory)
        return directory if config and config.root == normalized_root(settings.root) else None
    return directory


def foreign_to(config: "StackConfig | None") -> tuple[str, ...]:
    """Prefixes of variables to remove before the environment of the stack is set.

    A stack that serves an existing store uses its credentials from the environment, so AWS variables stay.
    """
    return ("RAY_AUTH_",) if config and config.root else FOREIGN


def stopped_message(directory: Path) -> str:
    """The message for a stack that is down, so that its store cannot be read."""
    return f"the local stack in {directory} is down, so its store cannot be read; `vitline stack up` starts it"


@contextlib.contextmanager
def local_store() -> Iterator[tuple[str, str]]:
    """The root that this process should read, and text to append to an error if something is missing there.

    The text is empty, or says that the stack is down. While the context is open, the environment has the credentials of
    the stack's store; afterwards it is restored.
    """
    settings = Settings()
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
