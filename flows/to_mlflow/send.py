"""The sender: sends MLflow what it lacks of the runs and pipelines in the outbox of a root.

    python -m vitline.flows.to_mlflow.send               a service, until it is stopped
    python -m vitline.flows.to_mlflow.send --parent PID  until that process ends, whose child this is; then once more
    python -m vitline.flows.to_mlflow.send --once        until each entry has been tried once, by this sender or another

Of all senders of a root one sends: the holder of the lease `leases/mlflow-<digest of the server's URI and vitline's version>`. The
others wait until it ends, or has been silent for LEASE_S. Two versions do not send each other's runs, because a flow process may
live for days; what an older one left is put into the outbox again by `vitline ops reconcile` and `vitline runs send`. Only a sender
that has something to send imports MLflow. Where it is interrupted, the next finds in MLflow how much was sent.
"""

import argparse
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.outbox import Mark, OutboxEntry
from vitline.infra.config import digest_of
from vitline.infra.records import read_each
from vitline.infra.redact import log_to_stderr, redact
from vitline.infra.runs.lease import LeaseHeld, LeaseHolder, LeaseLost, acquire_lease, held
from vitline.infra.runs.liveness import Watch
from vitline.infra.runs.segments import list_segments
from vitline.infra.settings import Settings, secret_values, set_environment, user_at_host
from vitline.infra.settings_file import use_settings_file
from vitline.infra.storage import Store, open_store

if TYPE_CHECKING:
    from vitline.flows.to_mlflow.send_run import Sender

log = logging.getLogger("sender")
LEASE_S = 30.0
LOOK_S = 2.0
"""Interval of listings of the outbox, and of tries to take the lease."""
AWAY_S = 10.0
"""The same while MLflow does not answer."""
PASS_S = 10.0
"""After this time the outbox is listed again, although entries are left: those of living runs do not wait for all the others."""
CONTENT_S = 5.0
"""Interval of checks whether a run has changed."""
SEGMENTS_S = 15.0
"""Interval of listings of new segments while the state of a run is unchanged; they come every 30 s."""
LONGEST_WAIT_S = 300.0
"""Longest interval between two tries of an entry that fails although MLflow answers."""
# MLflow's defaults wait for minutes and repeat a POST that a slow server has not answered, so that it creates two of what the POST
# creates. Here nothing is repeated: whatever fails is sent again later, and searched for before it is created.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "DO_NOT_TRACK": "true",
}


@dataclass
class Followed:
    """An entry of the outbox that this sender works on."""

    tag: str
    """That of the listing which showed `mark`."""
    mark: Mark
    content: Any = None
    """Identifies what was in the store when it was last sent completely."""
    segments_at: float = float("-inf")
    failures: int = 0
    due: float = 0.0


class Sending:
    """Sends the entries of an outbox under a lease. `alive()` is called before each."""

    def __init__(
        self, root: Store, lease: LeaseHolder, connect: "Callable[[], Sender]", alive: Callable[[], object]
    ) -> None:
        self._root, self._lease, self._connect, self._alive = root, lease, connect, alive
        self._followed: dict[OutboxEntry, Followed] = {}
        self._sender: Sender | None = None
        self._answers = False

    def once(self) -> float:
        """Sends what is new in the outbox and what has changed, for about PASS_S. Returns the seconds until the next look: 0 if entries
        are left. If MLflow does not answer, this ends after one request.

        What fails although MLflow answers is tried twice, and again at growing intervals. Raises LeaseLost without the lease.
        """
        due, until = self._due(), time.monotonic() + PASS_S
        for number, (entry, followed) in enumerate(due):
            self._alive()
            if time.monotonic() > until:
                return 0.0
            for again in (True, False):
                if away := self._away():
                    for each in due[number:]:
                        self._note(*each, away)
                    return AWAY_S
                if self._try(entry, followed, again):
                    break
        return LOOK_S

    def _due(self) -> list[tuple[OutboxEntry, Followed]]:
        """The entries to look at: first what was sent before and may have grown, then what was put last."""
        listed, known = outbox.listed(self._root), self._followed
        changed = [entry for entry, tag in listed.items() if entry not in known or known[entry].tag != tag]
        for entry, mark in zip(changed, read_each(changed, partial(outbox.read, self._root)), strict=True):
            if mark is None:  # it was deleted meanwhile
                known.pop(entry, None)
            elif entry in known and known[entry].mark.nonce == mark.nonce:
                known[entry].tag, known[entry].mark = listed[entry], mark
            else:
                known[entry] = Followed(listed[entry], mark)
        self._followed = {entry: each for entry, each in known.items() if entry in listed}
        if self._sender is not None:
            self._sender.forget_others({entry.key for entry in self._followed})
        own = [(entry, each) for entry, each in self._followed.items() if each.mark.version == outbox.VERSION]
        due = [(entry, each) for entry, each in own if each.due <= time.monotonic()]
        return sorted(due, key=lambda item: (item[1].content is None, -item[1].mark.at))

    def _away(self) -> str:
        """Why MLflow does not answer; empty if it does. Asks only if the last request has failed."""
        if not self._answers:
            try:
                self._sender = self._sender or self._connect()
                self._sender.tracking.ping()
            except Exception as error:
                return one_line(error)
            self._answers = True
        return ""

    def _try(self, entry: OutboxEntry, followed: Followed, again: bool) -> bool:
        """Whether there is no more to do now: a second failure is noted."""
        try:
            self._send(entry, followed)
        except LeaseLost:
            raise
        except Exception as error:
            log.debug("%s %s", *entry, exc_info=True)
            self._answers = False
            if not again:
                followed.failures += 1
                followed.due = time.monotonic() + min(CONTENT_S * 2**followed.failures, LONGEST_WAIT_S)
                self._note(entry, followed, one_line(error))
            return not again
        return True

    def _send(self, entry: OutboxEntry, followed: Followed) -> None:
        content = self._content(entry, followed)
        if content != followed.content:
            self._lease.check()
            ended = outbox.has_ended(self._root, entry)  # before the run is read
            assert self._sender is not None
            outcome = self._sender.send(entry)
            if outcome != "unchanged":
                log.info("%s %s: %s", *entry, outcome)
            followed.content, followed.failures = content, 0
            if ended:
                outbox.clear(self._root, entry, followed.mark.nonce)
            else:
                self._note(entry, followed, "")
        followed.due = time.monotonic() + CONTENT_S

    def _note(self, entry: OutboxEntry, followed: Followed, why: str) -> None:
        """Notes an outcome, unless the entry has it already; of several reasons of a failure it has the first."""
        if followed.mark.why is None or bool(followed.mark.why) != bool(why):
            if why:
                log.warning("%s %s is not sent: %s", *entry, why)
            outbox.note(self._root, entry, followed.mark.nonce, why)

    def _content(self, entry: OutboxEntry, followed: Followed) -> Any:
        """Identifies the content of a run in few requests: state, attempts and, every SEGMENTS_S, the segments."""
        if entry.kind == "pipeline":
            return self._root.read_tagged_or_none(f"pipelines/{entry.key}.json")[1]
        store, now = self._root.child(f"runs/{entry.key}"), time.monotonic()
        state = [store.read_tagged_or_none(key)[1] for key in ("state.json", "reconciled.json")]
        if followed.content and followed.content[0] == state and now - followed.segments_at < SEGMENTS_S:
            return followed.content
        followed.segments_at = now
        return (state, store.list("attempts/"), list_segments(store))


def one_line(error: Exception) -> str:
    """An error as one line; of a request without an answer its address and the innermost cause."""
    text = " ".join(str(error).split())
    if found := re.fullmatch(r"API request to (\S+) failed with (?:timeout )?exception (.*)", text):
        # As in HTTPConnectionPool(...): Max retries exceeded with url: ... (Caused by NewConnectionError('<object>: [Errno 111] ...'))
        cause = re.sub(r"""^\w+\(["'](.*)["']\)*$""", r"\1", found[2].rpartition("Caused by ")[2])
        return f"MLflow does not answer (API request to {found[1]}: {cause})"[:500]
    return f"{type(error).__name__}: {text}"[:500]


def lease_key(uri: str) -> str:
    """The name of the lease, below `leases/`, of a server. A server with two addresses has two leases."""
    return f"mlflow-{digest_of([redact(uri.rstrip('/')), outbox.VERSION])[:12]}"


def work(root: Store, uri: str, *, once: bool, has_parent: Callable[[], bool], alive: Callable[[], object]) -> None:
    """Sends whenever this process has the lease, until the end of its lifetime."""
    name, watch = lease_key(uri), Watch()
    store, owner = root.child(f"leases/{name}"), f"{user_at_host()}:{os.getpid()}"
    awaited = list(outbox.listed(root)) if once else []

    def connect() -> "Sender":
        from vitline.flows.to_mlflow.send_run import Sender
        from vitline.infra.mlflow.tracking import Tracking

        return Sender(root, Tracking(uri, secret_values()))

    while True:
        alive()
        last = not has_parent()
        try:
            mine = acquire_lease(
                store, name, job_state=lambda job: None, owner=owner, lease_timeout_s=LEASE_S, watch=watch
            )
            with held(store, mine, every_s=LEASE_S / 6) as lease:
                sending = Sending(root, lease, connect, alive)
                while True:
                    last = once or not has_parent()
                    wait_s = sending.once()
                    if last and wait_s:
                        return
                    alive()
                    time.sleep(wait_s)
        except LeaseHeld as other:
            while awaited and not outbox.is_untried(root, awaited[0]):
                del awaited[0]
            if last or (once and not awaited):
                return
            log.debug("%s", other)
        except LeaseLost as error:
            log.warning("%s", error)
            watch = Watch()
        except Exception as error:  # as when the store does not answer for a moment
            if last:
                raise
            log.warning("trying again in %.0f s: %s", LOOK_S, one_line(error))
        time.sleep(LOOK_S)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lifetime = parser.add_mutually_exclusive_group()
    lifetime.add_argument("--parent", type=int, metavar="PID", help="end with this process, after sending the rest")
    lifetime.add_argument("--once", action="store_true", help="end when each entry of the outbox has been tried")
    parser.add_argument("--alive", type=Path, help="file that is touched while the sender works or waits")
    args = parser.parse_args(argv)
    log_to_stderr()
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs three lines for every try
    use_settings_file()
    settings = Settings()
    if settings.mlflow_tracking_uri is None:
        parser.error("MLFLOW_TRACKING_URI is not set, so there is no server to send runs to. Set it.")
    set_environment(_ENVIRONMENT)
    os.nice(5)  # training goes first

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(0)  # also out of a request that hangs; the lease is released on the way

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    work(
        open_store(settings.root),
        settings.mlflow_tracking_uri,
        once=args.once,
        has_parent=lambda: args.parent in (None, os.getppid()),
        alive=args.alive.touch if args.alive else lambda: None,
    )


if __name__ == "__main__":
    main()
