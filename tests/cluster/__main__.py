"""Makes hosts with a store and a Ray, prints how to use them, and removes them at Ctrl-C.

python -m tests.cluster [NUMBER]
"""

import shlex
import signal
import sys
import time

from vitline.infra.local.stack_config import BUCKET

from .ray_hosts import ray_hosts, why_not_here


def main(number: int = 7) -> None:
    """Raises SystemExit where hosts cannot be made, and at SIGTERM."""
    if why := why_not_here():
        sys.exit(f"tests.cluster: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    with ray_hosts(number) as cluster:
        cluster.join(cluster.hosts.names[1:])
        for host in cluster.hosts.names:
            enter = shlex.join(cluster.hosts.entered(host, ["bash"]))
            print(f"{host}  {cluster.hosts.address(host)}  {enter}")
        print(f"\nOn {cluster.head}, commands of vitline use the store and the Ray with these variables:\n")
        for name, value in cluster.variables(f"s3://{BUCKET}/root").items():
            print(f"export {name}={value}")
        print(f"\nReady after {time.monotonic() - began:.0f} s. Ctrl-C removes all of it.", flush=True)
        signal.pause()


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:2]))
    except KeyboardInterrupt:
        sys.exit(130)
