"""The shipper service: sends MLflow what shippers left in the outbox, as when one was killed or MLflow did not answer.

    python -m vitline.flows.to_mlflow.ship_left [--alive FILE]

It lists the outbox (`outbox.py`) every few seconds. Once a run of it has ended and MLflow answers, it starts a child that sends
the run. The local stack runs this service; elsewhere, run one process of it with the same environment. Imports no MLflow.
"""

import argparse
import json
import logging
import signal
import threading
import time
import urllib.request
from pathlib import Path

from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.messages import SyncAnswer
from vitline.flows.to_mlflow.shipper import start_child
from vitline.infra.redact import log_to_stderr
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store

log = logging.getLogger("ship_left")
POLL_S = 10.0
QUIET_S = 10.0  # runs that ended more recently are still being sent by their own shipper
LONGEST_WAIT_S = 300.0  # longest interval between two tries of an entry


class Keeper:
    """Sends the entries of the outbox; those that fail are tried again at growing intervals."""

    def __init__(self, settings: Settings) -> None:
        if settings.mlflow_tracking_uri is None:
            raise ValueError("MLFLOW_TRACKING_URI is not set, so there is no server to send runs to. Set it.")
        self._settings, self._uri = settings, settings.mlflow_tracking_uri
        self._root: Store = open_store(settings.root)
        self._tries: dict[outbox.OutboxEntry, tuple[int, float]] = {}
        """Number of failed tries of an entry, and the time of the next one."""

    def look(self) -> dict[str, str]:
        """Sends the entries that are due. Returns the reason of each failure by key."""
        now = time.monotonic()
        left = outbox.left(self._root, QUIET_S)
        self._tries = {entry: tried for entry, tried in self._tries.items() if entry in left}
        due = [entry for entry in left if self._tries.get(entry, (0, now))[1] <= now]
        if not due or not self._answers():
            return {}
        child = start_child(self._settings, ["--left"], None)
        answer, _ = child.communicate()
        report: SyncAnswer | None = json.loads(answer) if child.returncode == 0 else None
        if report and report["sent"]:
            log.info("sent the rest of %s", ", ".join(report["sent"]))
        reasons = report["left"] if report else {}
        for key, why in reasons.items():
            log.warning("%s is not sent: %s", key, why)
        for entry in due:
            tries = self._tries.get(entry, (0, 0.0))[0] + 1
            self._tries[entry] = tries, time.monotonic() + min(POLL_S * 2 ** (tries - 1), LONGEST_WAIT_S)
        return reasons

    def _answers(self) -> bool:
        """Whether MLflow answers. To find out by starting a child would cost seconds of CPU."""
        try:
            with urllib.request.urlopen(f"{self._uri.rstrip('/')}/health", timeout=5) as reply:
                status: int = reply.status
        except OSError:
            return False
        return status == 200


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alive", type=Path, help="file that is touched at every listing of the outbox")
    args = parser.parse_args(argv)
    log_to_stderr()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    keeper = Keeper(Settings())
    while not over.is_set():
        try:
            keeper.look()
        except Exception as error:  # as when the store does not answer for a moment
            log.warning("trying again in %.0f s: %s: %s", POLL_S, type(error).__name__, error)
        if args.alive:
            args.alive.touch()
        over.wait(POLL_S)


if __name__ == "__main__":
    main()
