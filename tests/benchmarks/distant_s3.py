"""A real S3 service behind a proxy with latency, for benchmarks: a SeaweedFS of its own, and the proxy in a process of its own, so that
neither shares an interpreter with what is measured."""

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vitline.infra.local.stack import stack_environment, start_stack, stop_stack
from vitline.infra.settings import changed_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers.faulty_s3 import proxy_before


class DistantProxy:
    """A proxy in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.url: str = pipe.recv()

    def change(self, **attributes: Any) -> dict[str, int]:
        """Sets attributes of the `Proxy`, such as `latency_s`, `every` and `faults`. Faults are given as a tuple. Returns how many requests
        suffered each fault until now."""
        self._pipe.send(attributes)
        suffered: dict[str, int] = self._pipe.recv()
        return suffered


@contextlib.contextmanager
def own_s3() -> Iterator[str]:
    """The root of an empty store, which this process reaches meanwhile."""
    with tempfile.TemporaryDirectory(prefix="vl-b-") as folder:
        directory = Path(folder) / "stack"
        try:
            start_stack(directory, log_dir=Path(folder) / "logs", services=("s3",), announce=print)
            env = stack_environment(directory)
            with changed_environment(**{name: value for name, value in env.items() if name.startswith("AWS_")}):
                yield env["VITLINE_ROOT"]
        finally:
            stop_stack(directory)


@contextlib.contextmanager
def distant_s3(latency_s: float) -> Iterator[tuple[str, DistantProxy]]:
    """The root of an empty store, and the proxy, through which this process reaches it in stores that it opens from now on."""
    with (
        own_s3() as root,
        proxy_process() as proxy,
        changed_environment(AWS_ENDPOINT_URL=proxy.url, AWS_ENDPOINT_URL_S3=proxy.url),
    ):
        proxy.change(latency_s=latency_s)
        yield root, proxy


@contextlib.contextmanager
def proxy_process() -> Iterator[DistantProxy]:
    """A proxy before the S3 service of this environment."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield DistantProxy(here)
    finally:
        here.close()
        process.join()


def serve(pipe: Connection) -> None:
    with proxy_before(os.environ["AWS_ENDPOINT_URL"]) as proxy, contextlib.suppress(EOFError):
        pipe.send(proxy.url)
        while True:  # until the other end is closed
            for name, value in pipe.recv().items():
                setattr(proxy, name, itertools.cycle(value) if name == "faults" else value)
            pipe.send(dict(proxy.suffered))
