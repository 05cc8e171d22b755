"""The shipper's child process: sends what the store holds of runs and pipelines to MLflow (DESIGN 3.5).

    python -m flows.to_mlflow.ship_runs --root URI --parent P  follows what JSON lines on stdin name, until stdin ends
    python -m flows.to_mlflow.ship_runs --root URI --sync ...  sends what is missing of all runs, or of some, and ends
    python -m flows.to_mlflow.ship_runs --root URI --left      sends what other shippers have left (`outbox.py`), and ends

Lines in: {"run": key}, {"pipeline": key}, {"close": seconds}. Out, after close or at the end of a sync: one JSON object.
The store is the truth: whatever is cut off here, the next shipper finds how far MLflow is and sends the rest.
"""

import argparse
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flows.records import list_run_keys
from flows.to_mlflow import outbox
from flows.to_mlflow.outbox import Kind
from flows.to_mlflow.send_run import Sender
from flows.to_mlflow.stage_snapshots import list_pipelines
from infra.mlflow.tracking import Tracking
from infra.redact import log_to_stderr
from infra.runs.journal import list_segments
from infra.settings import Settings, secret_values
from infra.storage import Store, open_store

log = logging.getLogger("shipper")

POLL_S, MAX_BACKOFF_S = 5.0, 15.0
LISTING_S = 15.0  # between two looks for new segments of a run whose state has not changed; they come every 30 s
LAST_TRIES = 3  # of a close; a second apart
ORPHAN_S = 5.0  # to send what is sealed once the parent is gone


@dataclass
class Followed:
    """A run or pipeline that is followed. `sign` is what the store showed when it was last sent whole."""

    kind: Kind
    key: str
    sign: Any = None
    listed_at: float = float("-inf")


class Follower:
    """Sends what is followed, again and again, in a thread. MLflow away: it tries again, at growing intervals."""

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
        """Tries for so long to send everything as it stands now; the keys that are not wholly sent."""
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
            ok = self._pass(closing, asking_first=failures > 0)
            failures = 0 if ok else failures + 1
            last_tries += closing
            if closing and (ok or last_tries == LAST_TRIES):
                self.done.set()
                return
            self._wake.wait(1.0 if closing else min(POLL_S * 2**failures, MAX_BACKOFF_S) if failures else POLL_S)
            self._wake.clear()

    def _pass(self, closing: bool, asking_first: bool) -> bool:
        with self._lock:
            followed = list(self._followed.values())
        ok = True
        if asking_first:  # one request may hang; not one for each run
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
        sign = self._sign(each, closing)
        if sign is not None and sign == each.sign:
            return
        outcome = self._connected().send(each.kind, each.key)
        if outcome != "unchanged":
            log.info("%s %s: %s", each.kind, each.key, outcome)
        each.sign = sign

    def _connected(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self._root, self._connect())
        return self._sender

    def _sign(self, each: Followed, closing: bool) -> Any:
        """What the store shows of it, in few requests: state, attempts and, now and then, the segments."""
        if each.kind == "pipeline":
            return tagged(self._root, f"pipelines/{each.key}.json")
        store = self._root.child(f"runs/{each.key}")
        state = (tagged(store, "state.json"), tagged(store, "verdict.json"))
        now = time.monotonic()
        if not closing and each.sign and each.sign[0] == state and now - each.listed_at < LISTING_S:
            return each.sign
        each.listed_at = now
        return (state, store.list("attempts/"), list_segments(store))


def tagged(store: Store, key: str) -> str | None:
    try:
        return store.read_tagged(key)[1]
    except FileNotFoundError:
        return None


def one_line(error: Exception) -> str:
    """What went wrong, for people; of an MLflow that is away no more than that."""
    text = " ".join(str(error).split())
    if "failed with exception" in text and "API request to" in text:
        return f"MLflow does not answer ({text.partition(' failed with exception')[0]})"
    return f"{type(error).__name__}: {text}"[:500]


def sync(root: Store, tracking: Tracking, keys: list[str]) -> dict[str, Any]:
    """Sends what is missing of the named runs and pipelines, or of all."""
    known: list[tuple[Kind, str]] = [("run", key) for key in list_run_keys(root)]
    known += [("pipeline", key) for key in list_pipelines(root)]
    return send_each(root, tracking, [(kind, key) for kind, key in known if not keys or key in keys])


def send_each(root: Store, tracking: Tracking, chosen: Sequence[tuple[Kind, str]]) -> dict[str, Any]:
    """Keys by what became of them, and why some are left. Stops where MLflow itself does not answer."""
    sender = Sender(root, tracking)
    done: dict[str, list[str]] = {name: [] for name in ("sent", "unchanged", "absent", "deleted")}
    left: dict[str, str] = {}
    for number, (kind, key) in enumerate(chosen):
        try:
            if left or not number:
                tracking.ping()
        except Exception as error:
            left |= dict.fromkeys([key for _, key in chosen[number:]], one_line(error))
            break
        try:
            done[sender.send(kind, key)].append(key)
        except Exception as error:
            log.debug("%s", key, exc_info=True)
            left[key] = one_line(error)
    return {**done, "left": left}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--parent", type=int, help="process that is followed into its end")
    parser.add_argument("--sync", nargs="*", metavar="KEY")
    parser.add_argument("--left", action="store_true")
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what MLflow prints belongs into the log
    log_to_stderr()
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # says each of its tries, in three lines
    uri = Settings().mlflow_tracking_uri
    if uri is None:
        parser.error("MLFLOW_TRACKING_URI is not set: there is no server to send to.")
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
    with contextlib.suppress(BrokenPipeError):  # the parent was killed; what is left is in the outbox
        print(json.dumps({"left": left}), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # a request that hangs is not waited for


def follow_stdin(follower: Follower, parent: int | None) -> list[str]:
    """Obeys the parent's lines; returns what is left at its word, or a few seconds after its end."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            # A process that the parent forked may hold the pipe open after it.
            line = {} if parent in (None, os.getppid()) else None
        if line is None:
            return follower.close(ORPHAN_S)
        if "close" in line:
            return follower.close(line["close"])
        for kind in ("run", "pipeline"):
            if kind in line:
                follower.follow(kind, line[kind])


if __name__ == "__main__":
    main()
