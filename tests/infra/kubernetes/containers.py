"""A container of a manifest as a plain process."""

import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from ..plain_processes import PlainProcess
from .manifests import Pod


class Container(PlainProcess):
    """`secrets`: NAME/KEY to value. `here`: texts of the manifest, such as addresses, ports and folders, to those of this machine."""

    def __init__(
        self,
        pod: Pod,
        name: str,
        configs: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, str],
        here: Mapping[str, str],
    ) -> None:
        super().__init__(f"{pod.name}/{name}", here)
        (self.spec,) = (each for each in pod.containers if each["name"] == name)
        self._secrets, self._configs = secrets, configs

    def variables(self) -> dict[str, str]:
        """What Kubernetes sets."""
        found: dict[str, str] = {}
        for source in self.spec.get("envFrom", []):
            if "configMapRef" in source:
                config = self._configs[source["configMapRef"]["name"]]
                found |= {name: self.mapped(value) for name, value in config.items()}
            else:
                prefix = f"{source['secretRef']['name']}/"
                found |= {at.removeprefix(prefix): of for at, of in self._secrets.items() if at.startswith(prefix)}
        for variable in self.spec.get("env", []):
            where = variable.get("valueFrom", {})
            if "secretKeyRef" in where:
                found[variable["name"]] = self._secrets[
                    f"{where['secretKeyRef']['name']}/{where['secretKeyRef']['key']}"
                ]
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
