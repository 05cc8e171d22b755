"""The services of infra/compose/compose.yaml, as Compose reads the file and as plain processes."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..plain_processes import PlainProcess

FOLDER = Path(__file__).parents[3] / "infra" / "compose"
_FOLDERS = (
    "/docker-entrypoint-initdb.d", "/etc/vitline", "/run/secrets", "/store", "/tmp", "/var/lib/postgresql/data", "/var/run/postgresql",
)  # fmt: skip
"""What containers have of their own, as files, secrets, volumes and tmpfs."""


def read(settings: Mapping[str, str]) -> dict[str, Any]:
    """compose.yaml with the settings of `.env` in place of its variables. Raises KeyError for one that must be set."""
    found: dict[str, Any] = _filled(yaml.safe_load((FOLDER / "compose.yaml").read_text()), settings)
    return found


def _filled(value: Any, settings: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, settings) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, settings) for each in value]

    def of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return settings.get(found["name"]) or found["default"] if found["sign"] == "-" else settings[found["name"]]

    pattern = r"\$\$|\$\{(?P<name>\w+):(?P<sign>[-?])(?P<default>[^}]*)\}"
    return re.sub(pattern, of, value) if isinstance(value, str) else value


class Service(PlainProcess):
    """A service whose folders are below `root`, with what compose.yaml mounts into them: secrets, and files with the texts of this machine.

    `here`: other texts of the file to those of this machine. `image`: variables that its image sets. `more_words`: what its command gets
    besides, such as ports that a container has for itself. `programs`: words of its command to those that stand for them. `as_nobody`:
    not as root, if the test runs as root.
    """

    def __init__(
        self,
        composed: Mapping[str, Any],
        name: str,
        root: Path,
        secrets: Path,
        here: Mapping[str, str],
        image: Mapping[str, str],
        more_words: Sequence[str] = (),
        programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
        as_nobody: bool = False,
    ) -> None:
        self.spec: Mapping[str, Any] = composed["services"][name]
        self._image, self._more_words, self._programs = image, more_words, programs
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if as_nobody and os.geteuid() == 0 else {}
        super().__init__(name, {each: f"{root}{each}" for each in _FOLDERS} | dict(here), cwd=root, **user)
        for folder in _FOLDERS:
            (root / folder[1:]).mkdir(parents=True)
        for secret in self.spec.get("secrets", []):
            file = Path(composed["secrets"][secret]["file"]).name
            shutil.copy(secrets / file, root / "run/secrets" / secret)
        for source, target in (volume.split(":")[:2] for volume in self.spec.get("volumes", []) if ":" in volume):
            if source.startswith("./"):
                Path(self.mapped(target)).write_text(self.mapped((FOLDER / source).read_text()))
        if user:
            for path in (root, *root.rglob("*")):
                shutil.chown(path, "nobody", "nogroup")

    def variables(self) -> dict[str, str]:
        return {name: self.mapped(value) for name, value in {**self._image, **self.spec.get("environment", {})}.items()}

    def command(self, **more: str) -> list[str]:
        return [*self.one_off(*self.spec["command"]), *self._more_words]

    def one_off(self, *command: str) -> list[str]:
        """Another command in its place, as that of `docker compose run`."""
        given = [*self.spec.get("entrypoint", []), *command]
        return [each for word in given for each in self._programs.get(word, [self.mapped(word)])]

    def probes(self) -> list[Mapping[str, Any]]:
        return [self.spec["healthcheck"]]

    def probed(self, probe: Mapping[str, Any], **more: str) -> bool:
        kind, *words = probe["test"]
        return self.succeeds({"CMD": words, "CMD-SHELL": ["/bin/sh", "-c", *words]}[kind], **more)
