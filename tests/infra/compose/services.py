"""The services of infra/compose/compose.yaml, as Compose reads the file, each on a host of this machine."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ...cluster.hosts import Hosts
from ...servers.images import Images
from ..container_process import ContainerProcess

FOLDER = Path(__file__).parents[3] / "infra" / "compose"
_OF_IMAGES = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "vitline", "VITLINE_HOME": "/tmp/vitline"}
"""Variables that images set."""


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


class Service(ContainerProcess):
    """A service on the host of its name, which makes the folder of what compose.yaml mounts; all else as in ContainerProcess.

    `secrets`: the folder of their files. `more_words`: what its command gets besides. `programs`: words of its command to those that stand
    for them. `as_nobody`: not as root where it is a plain process.
    """

    def __init__(
        self,
        composed: Mapping[str, Any],
        name: str,
        hosts: Hosts,
        secrets: Path,
        here: Mapping[str, str],
        images: Images | None,
        more_words: Sequence[str] = (),
        programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
        as_nobody: bool = False,
    ) -> None:
        self.spec: Mapping[str, Any] = composed["services"][name]
        self._hosts, self._more_words, self._programs, self._as_nobody = hosts, more_words, programs, as_nobody
        user, working = int(self.spec["user"].partition(":")[0]), self.spec.get("working_dir")
        folder, image = hosts.folder / name, self.spec["image"]
        super().__init__(name, here, folder, self._places(), image, images, user, working)
        for mounted in self._mounts.values():
            mounted.mkdir(parents=True)
            mounted.chmod(0o777)
        for secret in self.spec.get("secrets", []):
            shutil.copy(secrets / Path(composed["secrets"][secret]["file"]).name, folder / "run/secrets" / secret)
        for source, target in self._files():
            (folder / target[1:]).write_text(self.mapped((FOLDER / source).read_text()))
        if as_nobody:
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, "nobody", "nogroup")

    def _files(self) -> list[list[str]]:
        """The files beside compose.yaml that it mounts, and where."""
        return [volume.split(":")[:2] for volume in self.spec.get("volumes", []) if volume.startswith("./")]

    def _places(self) -> set[str]:
        """The folders of files, secrets, volumes and tmpfs."""
        found = {str(Path(target).parent) for _, target in self._files()}
        found |= {volume.split(":")[-1] for volume in self.spec.get("volumes", []) if not volume.startswith("./")}
        found |= {mount.split(":")[0] for mount in self.spec.get("tmpfs", [])}
        return found | ({"/run/secrets"} if self.spec.get("secrets") else set())

    def variables(self) -> dict[str, str]:
        given = {**({} if self.in_image else _OF_IMAGES), **self.spec.get("environment", {})}
        return {name: self.mapped(value) for name, value in given.items()}

    def entered(self, command: list[str], **more: str) -> list[str]:
        nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if self._as_nobody else []
        return self._hosts.entered(self.title, [*nobody, *super().entered(command, **more)])

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
