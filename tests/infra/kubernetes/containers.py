"""A container of a manifest as a plain process: its command, its environment, its probes, on ports and folders of a test."""

import contextlib
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from vitline.infra.children import child_environment, end_children
from vitline.infra.local.processes import tail

from .manifests import Pod

_FOREIGN = ("AWS_", "MLFLOW_", "PREFECT_", "RAY_", "VITLINE_")
START_S = 240.0


class Container:
    """`secrets`: NAME/KEY to value. `here`: texts of the manifest, such as addresses, ports and folders, to those of this machine."""

    def __init__(
        self,
        pod: Pod,
        name: str,
        configs: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, str],
        here: Mapping[str, str],
    ) -> None:
        (self.spec,) = (each for each in pod.containers if each["name"] == name)
        self.pod, self.name, self._here = pod, name, here
        self._secrets, self._configs = secrets, configs

    def mapped(self, text: str) -> str:
        known = "|".join(re.escape(there) for there in sorted(self._here, key=len, reverse=True))
        return re.sub(rf"(?<![\w.])({known})(?![\w.])", lambda found: self._here[found[1]], text)

    def environment(self, **more: str) -> dict[str, str]:
        """What Kubernetes sets, and `more`."""
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
        found |= more
        return child_environment(found, (), _FOREIGN)

    def command(self, **more: str) -> list[str]:
        """Its command and arguments, with `$(NAME)` replaced as Kubernetes does."""
        known = self.environment(**more)
        words = [self.mapped(word) for word in (*self.spec.get("command", []), *self.spec.get("args", []))]
        return [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word) for word in words]

    def run(self, **more: str) -> str:
        """Runs it to its end, as an init container; its output. Fails the test where it fails."""
        done = subprocess.run(
            self.command(**more), env=self.environment(**more), capture_output=True, text=True, timeout=START_S
        )
        assert done.returncode == 0, f"{self.pod.name}/{self.name}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def running(self, log: Path, command: list[str] | None = None, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs it as a service, once its startup or readiness probe succeeds, until the context ends; then asks all its probes again."""
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command or self.command(**more),
                env=self.environment(**more),
                stdout=output,
                stderr=output,
                cwd=log.parent,
            )
        try:
            probes = [
                self.spec[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in self.spec
            ]
            assert probes
            deadline = time.monotonic() + START_S
            while not self.probed(probes[0], **more):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{self.pod.name}/{self.name} does not start: {tail(log, 30)}")
                time.sleep(0.25)
            yield process
            assert all(self.probed(probe, **more) for probe in probes), tail(log, 30)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
                end_children([process], 20)
                for child in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                psutil.wait_procs(below, 10)

    def probed(self, probe: Mapping[str, Any], **more: str) -> bool:
        """Whether a probe succeeds, as the kubelet asks it."""
        if "exec" in probe:
            words = [self.mapped(word) for word in probe["exec"]["command"]]
            return subprocess.run(words, env=self.environment(**more), capture_output=True).returncode == 0
        (port,) = (each["containerPort"] for each in self.spec["ports"] if each["name"] == probe["httpGet"]["port"])
        url = f"http://127.0.0.1:{self.mapped(str(port))}{probe['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as reply:
                return bool(reply.status < 400)
        except OSError:
            return False
