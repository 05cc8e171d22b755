"""A one-node Ray on this machine that ends with the process that started it."""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from vitline.infra.local.paths import make_private
from vitline.infra.local.processes import free_ports, temporary_folder
from vitline.infra.local.stack import run_supervisor, stop_stack
from vitline.infra.local.stack_config import StackConfig, write_stack_config


class LocalRay:
    """Context manager: a one-node Ray cluster with the GPUs that Ray finds, run by a supervisor like the services of the local stack.

    `env` has the variables for its clients: RAY_ADDRESS (the http URL of the job server, also `.address`) and the token.
    All its ports are on 127.0.0.1, unless more nodes may join. Those for gRPC demand a certificate that only this user can read, the
    others the token; without it they only give counters (for Prometheus) and health checks.

    At the end of the context, after Ctrl-C, and when this process is killed, all processes are ended, including running jobs (stop jobs
    that should write a checkpoint before), and Ray's logs are copied to `log_dir`. No other Ray on the machine is touched. The start
    waits as long as Ray makes progress, and `announce`s what it waits for. Raises RuntimeError with the last error of the log if Ray
    does not start.
    """

    def __init__(self, log_dir: Path, announce: Callable[[str], None] = lambda text: None, **options: Any) -> None:
        """`options`: those of StackConfig that Ray has, such as `num_cpus`."""
        self._log_dir, self._options, self._announce = log_dir.absolute(), options, announce

    def __enter__(self) -> Self:
        make_private(self._log_dir)
        with contextlib.ExitStack() as stack:
            config = StackConfig(
                id=secrets.token_hex(4),
                directory=stack.enter_context(temporary_folder()),
                ports={"ray": free_ports(1)[0]},
                object_store=False,
                only_ray=True,
                **self._options,
            )
            write_stack_config(config)
            self._supervisor = run_supervisor(config, self._log_dir, ["ray"], True, self._announce)
            stack.callback(self._supervisor.wait)
            stack.callback(stop_stack, config.directory)
            self._open = stack.pop_all()
        self.config, self.env = config, config.open_environment()
        self.address = self.env["RAY_ADDRESS"]
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def has_ended(self) -> bool:
        """Whether Ray has ended by itself; nothing starts it again."""
        return self._supervisor.poll() is not None
