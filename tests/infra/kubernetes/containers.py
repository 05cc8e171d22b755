"""A container of a manifest as a plain process, or as one of its image."""

import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...servers.images import Images
from ..plain_processes import PlainProcess
from .manifests import Pod


class Container(PlainProcess):
    """`secrets`: NAME/KEY to value. `here`: texts of the manifest, such as addresses, ports and folders, to those of this machine.
    `volumes`: the folder that has those of the pods at their places. With `images` the container is a process of its image, as the user
    of its pod, unless the image is not one of infra/images."""

    def __init__(
        self,
        pod: Pod,
        name: str,
        configs: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, str],
        here: Mapping[str, str],
        volumes: Path,
        images: Images | None = None,
    ) -> None:
        (self.spec,) = (each for each in pod.containers if each["name"] == name)
        self._user: int = pod.spec["securityContext"]["runAsUser"]
        self._secrets, self._configs, self._volumes = secrets, configs, volumes
        self._target, self._images = re.search(r"/vitline-(prep|train|flows):", self.spec["image"]), images
        folders = {} if self.in_image else {place: f"{volumes}{place}" for place in ("/tmp", "/etc")}
        super().__init__(f"{pod.name}/{name}", {**here, **folders, "s3://my-bucket": self.place("/tmp/bucket")})

    @property
    def in_image(self) -> bool:
        return self._target is not None and self._images is not None

    def place(self, path: str) -> str:
        """Where it finds a file of its volumes."""
        return path if self.in_image else f"{self._volumes}{path}"

    def started(self, command: list[str], **more: str) -> dict[str, Any]:
        if self._target is None or self._images is None:
            return super().started(command, **more)
        places = (each["mountPath"] for each in self.spec["volumeMounts"] if each["mountPath"] != "/dev/shm")
        folders = {place: self._volumes / place[1:] for place in places}
        self._images.build(self._target[1])
        variables = self.variables() | more
        working = self.spec.get("workingDir", "/")
        entered = self._images.entered(self._target[1], command, folders, variables, self._user, working)
        return {"args": entered, "env": dict(os.environ)}

    def variables(self) -> dict[str, str]:
        """What Kubernetes sets."""
        found: dict[str, str] = {}
        for source in self.spec.get("envFrom", []):
            if "configMapRef" in source:
                config = self._configs[source["configMapRef"]["name"]]
                found |= {name: self.mapped(value) for name, value in config.items()}
            else:
                prefix = f"{source['secretRef']['name']}/"
                mine = {at: of for at, of in self._secrets.items() if at.startswith(prefix)}
                found |= {at.removeprefix(prefix): self.mapped(of) for at, of in mine.items()}
        for variable in self.spec.get("env", []):
            where = variable.get("valueFrom", {})
            if "secretKeyRef" in where:
                secret = f"{where['secretKeyRef']['name']}/{where['secretKeyRef']['key']}"
                found[variable["name"]] = self.mapped(self._secrets[secret])
            elif "fieldRef" in where:
                found[variable["name"]] = self._here[where["fieldRef"]["fieldPath"]]
            else:
                found[variable["name"]] = self.mapped(variable["value"])
        return found

    def command(self, **more: str) -> list[str]:
        """Its command and arguments, with `$(NAME)` replaced as Kubernetes does."""
        known = self.environment(**more)
        words = [self.mapped(word) for word in (*self.spec.get("command", []), *self.spec.get("args", []))]
        return [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word) for word in words]

    def probes(self) -> list[Mapping[str, Any]]:
        return [self.spec[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in self.spec]

    def probed(self, probe: Mapping[str, Any], **more: str) -> bool:
        """As the kubelet asks it."""
        if "exec" in probe:
            return self.succeeds(probe["exec"]["command"], **more)
        (port,) = (each["containerPort"] for each in self.spec["ports"] if each["name"] == probe["httpGet"]["port"])
        url = f"http://127.0.0.1:{self.mapped(str(port))}{probe['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as reply:
                return bool(reply.status < 400)
        except OSError:
            return False
