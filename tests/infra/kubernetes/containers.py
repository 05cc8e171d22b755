"""A container of a manifest as a plain process, or as one of its image."""

import re
import socket
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...servers.images import Images
from ..container_process import ContainerProcess
from .manifests import Pod


class Container(ContainerProcess):
    """`secrets`: NAME/KEY to value. `folder` has the volumes of the pods at their places; `on_host` gives the words that run a
    command on its host; all else as in ContainerProcess."""

    def __init__(
        self,
        pod: Pod,
        name: str,
        configs: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, str],
        here: Mapping[str, str],
        folder: Path,
        images: Images | None = None,
        on_host: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._on_host = on_host
        (self.spec,) = (each for each in pod.containers if each["name"] == name)
        self._secrets, self._configs = secrets, configs
        places = [each["mountPath"] for each in self.spec["volumeMounts"] if each["mountPath"] != "/dev/shm"]
        user, working = pod.spec["securityContext"]["runAsUser"], self.spec.get("workingDir")
        super().__init__(f"{pod.name}/{name}", here, folder, places, self.spec["image"], images, user, working)
        self._here["s3://my-bucket"] = self.place("/tmp/bucket")

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

    def entered(self, command: list[str], **more: str) -> list[str]:
        return self._on_host(super().entered(command, **more))

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
        asked, patience = probe.get("httpGet") or probe["tcpSocket"], probe.get("timeoutSeconds", 1)
        (port,) = (each["containerPort"] for each in self.spec["ports"] if each["name"] == asked["port"])
        there = self.mapped("status.podIP"), int(self.mapped(str(port)))
        try:
            if "tcpSocket" in probe:
                socket.create_connection(there, patience).close()
                return True
            with urllib.request.urlopen(f"http://{there[0]}:{there[1]}{asked['path']}", timeout=patience) as reply:
                return bool(reply.status < 400)
        except OSError:
            return False
