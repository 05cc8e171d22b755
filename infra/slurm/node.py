"""A further node of the Ray of a Slurm job: a task that `job.py` starts by `srun`, one on each node but the first.

Its standard input has one line, an `Invitation`, and ends with the job. Secrets so reach the nodes without a shared folder.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path

from vitline.infra.children import adopt_orphans, child_environment, end_descendants, how_it_ended, reap
from vitline.infra.config import FrozenConfig
from vitline.infra.local.paths import make_private, write_private
from vitline.infra.local.processes import tail, temporary_folder
from vitline.infra.local.ray_node import FOREIGN_TO_RAY, TLS_FOLDER, environment, further_command, keep_logs
from vitline.infra.local.stack_config import StackConfig
from vitline.infra.plain_text import last_words
from vitline.infra.settings import inherited_environment
from vitline.infra.slurm.allocation import network_towards, share_of_this_node

MAX_ENDS = 3
"""A Ray that has ended by itself so often on one node is not started again there."""
_LOOK_S = 0.5
_STARTED = "Ray runtime started"


class Invitation(FrozenConfig):
    """What a node needs to join the Ray of the first one."""

    address: str
    logs: Path
    """The folder for the logs of all nodes."""
    token: str
    tls: dict[str, str]
    """The files of the authority that signs the certificates of the nodes, by name."""


def main() -> None:
    """Ends with code 0 when the job does, with 1 if Ray cannot be started here."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    invitation = Invitation.model_validate_json(sys.stdin.readline())
    name = inherited_environment(()).get("SLURMD_NODENAME", "node")
    adopt_orphans()
    with temporary_folder() as folder:
        config = _config(folder, invitation)
        try:
            for nth in range(MAX_ENDS):
                started, ended = _run(config, invitation, folder / "node.log")
                if not ended:
                    return
                if nth == 0 and not started:
                    print(f"Ray does not start on {name}: {ended}", flush=True)
                    sys.exit(1)
                again = "it is started again" if nth + 1 < MAX_ENDS else "it is not started again"
                print(f"Ray on {name} {ended}; {again}", flush=True)
        finally:
            end_descendants({})
            with contextlib.suppress(OSError):
                keep_logs(config, make_private(invitation.logs / name))


def _config(folder: Path, invitation: Invitation) -> StackConfig:
    share, tls = share_of_this_node(), make_private(folder / TLS_FOLDER)
    for file, text in invitation.tls.items():
        write_private(tls / file, text)
    config = StackConfig(
        id=secrets.token_hex(4),
        directory=folder,
        ports={},
        object_store=False,
        only_ray=True,
        more_nodes=True,
        num_cpus=share.num_cpus,
        object_store_bytes=share.object_store_bytes,
    )
    write_private(config.ray_token, invitation.token)
    return config


def _run(config: StackConfig, invitation: Invitation, log: Path) -> tuple[bool, str]:
    """Runs Ray until the job ends. Whether Ray has started, and how it has ended by itself; empty at the end of the job."""
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(config.ray_token)}
    network = network_towards(invitation.address.rpartition(":")[0])
    with open(log, "wb") as output:
        ray = subprocess.Popen(
            further_command(config, invitation.address),
            env=child_environment(network | access | environment(config), FOREIGN_TO_RAY),
            cwd=config.folder,  # Ray lets a process that starts jobs import files of the current folder
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    started = False
    while ray.returncode is None:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if ready and not os.read(sys.stdin.fileno(), 1):
            return started, ""
        started = started or _STARTED in tail(log)
        reap({ray.pid: ray})
    end_descendants({})
    return started, f"{how_it_ended(ray.returncode)}: {last_words(tail(log))}"


if __name__ == "__main__":
    main()
