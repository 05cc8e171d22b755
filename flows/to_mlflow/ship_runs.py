"""The shipper's child process: sends runs and pipelines from the store to MLflow.

    python -m vitline.flows.to_mlflow.ship_runs --root URI --parent P  follows the runs named by JSON lines on stdin, until stdin ends
    python -m vitline.flows.to_mlflow.ship_runs --root URI --sync ...  sends what MLflow lacks of all runs, or of some, and ends
    python -m vitline.flows.to_mlflow.ship_runs --root URI --left      sends what other shippers left in the outbox, and ends

Input lines: {"run": key}, {"pipeline": key}, {"close": seconds}. Output after close, or at the end of a sync: one JSON object.
If this process is interrupted, the next shipper finds in MLflow how much was sent and sends the rest.
"""

import argparse
import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitline.flows.catalog.records import list_pipeline_keys, list_run_keys
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.messages import ParentLine, SyncAnswer
from vitline.flows.to_mlflow.outbox import Kind
from vitline.flows.to_mlflow.send_run import Sender
from vitline.infra.mlflow.tracking import Tracking
from vitline.infra.redact import log_to_stderr
from vitline.infra.runs.segments import list_segments
from vitline.infra.settings import Settings, secret_values
from vitline.infra.storage import Store, open_store

log = logging.getLogger("shipper")

POLL_S, MAX_BACKOFF_S = 5.0, 15.0
LISTING_S = 15.0  # interval of listings of new segments while the state of a run is unchanged; they come every 30 s
LAST_TRIES = 3  # tries of a close, one second apart
ORPHAN_S = 5.0  # time to send the rest once the parent is gone


@dataclass
class Followed:
    """A run or pipeline that is followed. `version` identifies its content in the store when it was last sent completely."""

    kind: Kind
    key: str
    version: Any = None
    listed_at: float = float("-inf")


class Follower:
    """Sends the followed runs repeatedly in a thread. If MLflow does not answer, it tries again at growing intervals."""

    def __init__(self, root: Store, connect: Callable[[], Tracking]) -> None:
        self._root, self._connect = root, connect
        self._sender: Sender | None = None
        self._followed: dict[tuple[Kind, str], Followed] = {}
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._left: set[str] = set()
        self.done = threading.Event()
        threading.Thread(target=self._work, name="sending", daemon=True).start()

    def follow(self, kind: Kind, key: str) -> None:
        with self._lock:
            self._followed.setdefault((kind, key), Followed(kind, key))
            self._left.add(key)
        self._wake.set()

    def close(self, seconds: float) -> list[str]:
        """Tries for this time to send everything in its present state. Returns the keys that are not completely sent."""
        with self._lock:
            self._left = {followed.key for followed in self._followed.values()}
        self._closing.set()
        self._wake.set()
        self.done.wait(seconds)
        with self._lock:
            return sorted(self._left)

    def _work(self) -> None:
        failures = last_tries = 0
        while True:
            closing = self._closing.is_set()
            ok = self._pass(closing, ping_first=failures > 0)
            failures = 0 if ok else failures + 1
            last_tries += closing
            if closing and (ok or last_tries == LAST_TRIES):
                self.done.set()
                return
            self._wake.wait(1.0 if closing else min(POLL_S * 2**failures, MAX_BACKOFF_S) if failures else POLL_S)
            self._wake.clear()

    def _pass(self, closing: bool, ping_first: bool) -> bool:
        with self._lock:
            followed = list(self._followed.values())
        ok = True
        if ping_first:  # at most one request may hang, not one for each run
            try:
                self._connected().tracking.ping()
            except Exception as error:
                log.warning("MLflow does not answer: %s", one_line(error))
                return False
        for each in followed:
            try:
                self._send(each, closing)
            except Exception as error:
                log.warning("%s %s is not sent: %s", each.kind, each.key, one_line(error))
                log.debug("", exc_info=True)
                ok = False
                continue
            with self._lock:
                self._left.discard(each.key)
        return ok

    def _send(self, each: Followed, closing: bool) -> None:
        version = self._version(each, closing)
        if version is not None and version == each.version:
            return
        outcome = self._connected().send(each.kind, each.key)
        if outcome != "unchanged":
            log.info("%s %s: %s", each.kind, each.key, outcome)
        each.version = version

    def _connected(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self._root, self._connect())
        return self._sender

    def _version(self, each: Followed, closing: bool) -> Any:
        """Identifies the content of a run in few requests: state, attempts and, every LISTING_S, the segments."""
        if each.kind == "pipeline":
            return tagged(self._root, f"pipelines/{each.key}.json")
        store = self._root.child(f"runs/{each.key}")
        state = (tagged(store, "state.json"), tagged(store, "verdict.json"))
        now = time.monotonic()
        if not closing and each.version and each.version[0] == state and now - each.listed_at < LISTING_S:
            return each.version
        each.listed_at = now
        return (state, store.list("attempts/"), list_segments(store))


def tagged(store: Store, key: str) -> str | None:
    try:
        return store.read_tagged(key)[1]
    except FileNotFoundError:
        return None


def one_line(error: Exception) -> str:
    """An error as one line; of a request without an answer its address and the innermost cause."""
    text = " ".join(str(error).split())
    if found := re.fullmatch(r"API request to (\S+) failed with (?:timeout )?exception (.*)", text):
        # As in HTTPConnectionPool(...): Max retries exceeded with url: ... (Caused by NewConnectionError('<object>: [Errno 111] ...'))
        cause = re.sub(r"""^\w+\(["'](.*)["']\)*$""", r"\1", found[2].rpartition("Caused by ")[2])
        return f"MLflow does not answer (API request to {found[1]}: {cause})"[:500]
    return f"{type(error).__name__}: {text}"[:500]


def sync(root: Store, tracking: Tracking, keys: list[str]) -> SyncAnswer:
    """Sends what MLflow lacks of the named runs and pipelines, or of all."""
    known: list[tuple[Kind, str]] = [("run", key) for key in list_run_keys(root)]
    known += [("pipeline", key) for key in list_pipeline_keys(root)]
    return send_each(root, tracking, [(kind, key) for kind, key in known if not keys or key in keys])


def send_each(root: Store, tracking: Tracking, chosen: Sequence[tuple[Kind, str]]) -> SyncAnswer:
    """Keys by outcome, and the reason for each key that is left unsent. Stops if MLflow itself does not answer."""
    sender = Sender(root, tracking)
    done: SyncAnswer = {"sent": [], "unchanged": [], "absent": [], "deleted": [], "left": {}}
    left = done["left"]
    for number, (kind, key) in enumerate(chosen):
        try:
            if left or not number:
                tracking.ping()
        except Exception as error:
            left.update(dict.fromkeys([key for _, key in chosen[number:]], one_line(error)))
            break
        try:
            done[sender.send(kind, key)].append(key)
        except Exception as error:
            log.debug("%s", key, exc_info=True)
            left[key] = one_line(error)
    return done


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--parent", type=int, help="process id of the parent; the child ends with it")
    parser.add_argument("--sync", nargs="*", metavar="KEY")
    parser.add_argument("--left", action="store_true")
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what MLflow prints goes to the log
    log_to_stderr()
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs three lines for every try
    uri = Settings().mlflow_tracking_uri
    if uri is None:
        parser.error("MLFLOW_TRACKING_URI is not set, so there is no server to send runs to. Set it.")
    root = open_store(args.root)
    if args.sync is not None:
        print(json.dumps(sync(root, Tracking(uri, secret_values()), args.sync)), file=answers, flush=True)
        return
    os.nice(5)  # training goes first
    if args.left:
        done = send_each(root, Tracking(uri, secret_values()), outbox.left(root))
        print(json.dumps(done), file=answers, flush=True)
        return
    left = follow_stdin(Follower(root, lambda: Tracking(uri, secret_values())), args.parent)
    with contextlib.suppress(BrokenPipeError):  # the parent was killed; what was not sent is in the outbox
        print(json.dumps({"left": left}), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # does not wait for a request that hangs


def follow_stdin(follower: Follower, parent: int | None) -> list[str]:
    """Follows the runs that the parent's lines name. Returns the unsent keys after a `close` line or the end of the parent."""
    lines: queue.Queue[ParentLine | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            # A process that the parent forked may keep the pipe open after the parent's end.
            line = {} if parent in (None, os.getppid()) else None
        if line is None:
            return follower.close(ORPHAN_S)
        if "close" in line:
            return follower.close(line["close"])
        if "run" in line:
            follower.follow("run", line["run"])
        if "pipeline" in line:
            follower.follow("pipeline", line["pipeline"])


if __name__ == "__main__":
    main()
