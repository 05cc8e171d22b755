"""A container as a plain process, or as one of its image: its command, environment and health checks, on ports and folders of a test."""

import contextlib
import os
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from vitline.infra.children import child_environment, end_children
from vitline.infra.local.processes import tail

from ..servers.images import Images

FOREIGN = ("AWS_", "MLFLOW_", "PREFECT_", "RAY_", "VITLINE_")
"""Beginnings of the variables that would connect a process to other servers."""
START_S, END_S = 240.0, 600.0
RAY_PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "600",
    "RAY_agent_register_timeout_ms": "600000",
}
"""Ray's own limits of starting, which are too short on a busy machine."""
RAY_START = ("-P", "-c", "from vitline.infra.local.ray_node import ray_start; ray_start()")
"""Arguments of Python for `ray`, which by itself gives up where its start takes longer than 30 s."""


class ContainerProcess(ABC):
    """`title` names it in failures. `here`: texts of its file, such as addresses and ports, to those of this machine. `folder` has what is
    mounted at its `places`. With `images` it is a process of its `image`, by the `user` of this number, unless that image is not one of
    infra/images; there it starts in `working`, by default that of the image."""

    def __init__(
        self,
        title: str,
        here: Mapping[str, str],
        folder: Path,
        places: Iterable[str],
        image: str,
        images: Images | None,
        user: int,
        working: str | None,
    ) -> None:
        ours = re.search(r"(?:^|/)vitline-(prep|train|flows):", image)
        self.in_image = bool(ours and images)
        self._target, self._images, self._user, self._working = ours and ours[1], images, user, working
        self.title, self.folder, self._mounts = title, folder, {place: folder / place[1:] for place in places}
        self._here = {**here, **{place: self.place(place) for place in places}}

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The environment that its file gives it."""

    @abstractmethod
    def command(self, **more: str) -> list[str]: ...

    @abstractmethod
    def probes(self) -> list[Mapping[str, Any]]:
        """Its health checks; the first tells when it has started."""

    @abstractmethod
    def probed(self, probe: Mapping[str, Any], **more: str) -> bool:
        """Whether a health check succeeds."""

    def mapped(self, text: str) -> str:
        known = "|".join(re.escape(there) for there in sorted(self._here, key=len, reverse=True))
        return re.sub(rf"(?<![\w.])({known})(?![\w.])", lambda found: self._here[found[1]], text)

    def environment(self, **more: str) -> dict[str, str]:
        """Its variables and `more`, without those of the test's own environment that it would not see in a container."""
        return child_environment(self.variables() | more, (), FOREIGN)

    def place(self, path: str) -> str:
        """Where it finds a file of its mounts."""
        return path if self.in_image else f"{self.folder}{path}"

    def entered(self, command: list[str], **more: str) -> list[str]:
        """The words that run a command where it runs."""
        if self._target is None or self._images is None:
            return command
        self._images.build(self._target)
        variables = self.variables() | more
        return self._images.entered(self._target, command, self._mounts, variables, self._user, self._working)

    def started(self, command: list[str], **more: str) -> dict[str, Any]:
        """The arguments of `subprocess.Popen` that start a command with its environment."""
        env = dict(os.environ) if self.in_image else self.environment(**more)
        return {"args": self.entered(command, **more), "env": env, "cwd": self.folder}

    def result(self, command: list[str] | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        """Runs it, or another command in its place, to the end."""
        started = self.started(command or self.command(**more), **more)
        return subprocess.run(**started, capture_output=True, text=True, timeout=END_S)

    def run(self, command: list[str] | None = None, **more: str) -> str:
        """Runs it, or another command in its place, to the end; the output. Fails the test where it fails."""
        done = self.result(command, **more)
        assert done.returncode == 0, f"{self.title}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def running(self, log: Path, command: list[str] | None = None, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs it as a service, once its first health check succeeds, until the context ends; then asks all its checks again."""
        with open(log, "wb") as output:
            started = self.started(command or self.command(**more), **more)
            process: subprocess.Popen[bytes] = subprocess.Popen(**started, stdout=output, stderr=output)

        def wait_for(probe: Mapping[str, Any], what: str) -> None:
            """A single one may fail on a busy machine: it waits for its answer only for seconds."""
            deadline = time.monotonic() + START_S
            while not self.probed(probe, **more):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{self.title} does not {what}: {tail(log, 30)}")
                time.sleep(0.25)

        try:
            probes = self.probes()
            assert probes
            wait_for(probes[0], "start")
            yield process
            for probe in probes:
                wait_for(probe, f"succeed at {probe}")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
                end_children([process], 20)
                for child in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                psutil.wait_procs(below, 10)

    def succeeds(self, words: list[str], **more: str) -> bool:
        """Whether a health check that is a command succeeds."""
        return self.result([self.mapped(word) for word in words], **more).returncode == 0
