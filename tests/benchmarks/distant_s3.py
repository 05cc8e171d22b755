"""A real S3 service behind a proxy with latency, for benchmarks: a SeaweedFS of its own, and the proxy in a process of its own, so that
neither shares an interpreter with what is measured."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from flows.chaos.faulty_proxy import proxy_before
from infra.local.stack import stack_environment, start_stack, stop_stack
from infra.settings import changed_environment


@contextlib.contextmanager
def distant_s3(latency_s: float) -> Iterator[str]:
    """The root of an empty store; this process reaches it through the proxy, in stores that it opens from now on."""
    with tempfile.TemporaryDirectory(prefix="vl-b-") as folder:
        directory = Path(folder) / "stack"
        try:
            start_stack(directory, log_dir=Path(folder) / "logs", services=("s3",), announce=print)
            env = stack_environment(directory)
            credentials = {name: value for name, value in env.items() if name.startswith("AWS_")}
            with (
                changed_environment(**credentials),
                proxy_process(latency_s) as url,
                changed_environment(AWS_ENDPOINT_URL=url, AWS_ENDPOINT_URL_S3=url),
            ):
                yield env["VITLINE_ROOT"]
        finally:
            stop_stack(directory)


@contextlib.contextmanager
def proxy_process(latency_s: float) -> Iterator[str]:
    """The address of a proxy, in a process of its own, before the S3 service of this environment."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(latency_s, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join()


def serve(latency_s: float, pipe: Connection) -> None:
    with proxy_before(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        proxy.latency_s = latency_s
        pipe.send(proxy.url)
        with contextlib.suppress(EOFError):
            pipe.recv()  # until the other end is closed
