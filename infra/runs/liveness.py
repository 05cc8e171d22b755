"""Whether something that shows no life is dead: the thresholds, the judgement by a clock, the watch, and the heartbeats of flow processes.

A clock only nominates, because a clock that is ahead, or a machine that was suspended, makes every heartbeat old. What looks dead is
watched first: what counts is what this process saw. `flow-runs/<flow run id>.json` is the heartbeat of a flow process. It is deleted
at the end, so a flow run that has one is active or was killed; Prefect keeps a run whose worker died with it as RUNNING.
"""

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.runs.in_background import in_background
from vitline.infra.settings import user_at_host
from vitline.infra.storage import Store

log = logging.getLogger(__name__)
BEAT_S = 10.0
"""Between two heartbeats of a flow process."""
LIFE_S = 60.0
"""Six missed heartbeats: a busy machine must not be taken for a dead one."""
WATCH_S = 30.0
"""How long what looks dead is watched: three heartbeats."""
FROZEN_S = 900.0
"""The same as LIFE_S for a job that Ray lists as running: its node may not reach the store for some minutes."""
FROZEN_WATCH_S = 120.0
FLOW_LEASE_S = 30.0
"""A lease of a flow process that was unchanged for so long may be acquired by another process."""
FLOW_RUNS = "flow-runs/"
_READERS = 16
_LONGEST_LOOK_S = 5.0
"""The most that the time between two looks counts. A process that was stopped in between saw nothing."""


@dataclass(frozen=True)
class Silence:
    """Which signs of life are old at one moment."""

    now: float
    quiet_s: float
    """How long what is dead has been silent at least."""
    dead_before: float = 0.0
    """What has shown life only before, in Unix seconds, is dead: all processes of a local stack were ended then."""

    def heartbeat_is_old(self, at: float, at_least_s: float = 0.0) -> bool:
        """Whether a heartbeat is old. One ahead of this clock is old as well: it shows no time, so only a watch can tell."""
        return at < self.dead_before or not 0 <= self.now - at < max(self.quiet_s, at_least_s)

    def is_old(self, at: float, at_least_s: float = 0.0) -> bool:
        """Whether a time of Ray or Prefect is old. Their clocks may be a little ahead; a time far ahead counts as old."""
        return at < self.dead_before or abs(self.now - at) >= max(self.quiet_s, at_least_s)


class Watch:
    """How long a sign of life, such as the counter of a lease, was unchanged while this process looked at it.

    Time is counted on the monotonic clock of this machine, so neither a clock that is ahead nor a suspended machine makes
    something old. Time in which this process itself was stopped counts next to nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sign: Hashable = None
        self._looked_at: float | None = None
        self._unchanged_s = 0.0
        self.moved = False
        """Whether the sign differed at the last look from that of the look before."""

    def unchanged_s(self, sign: Hashable) -> float:
        """Looks once: the seconds since `sign` was first seen; 0 if it differs from that of the look before."""
        now = self._clock()
        self.moved = self._looked_at is not None and sign != self._sign
        if self._looked_at is None or sign != self._sign:
            self._sign, self._unchanged_s = sign, 0.0
        else:
            self._unchanged_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._unchanged_s


def watch_until_moved(
    looks: Mapping[str, Callable[[], Hashable]],
    for_s: float | Mapping[str, float],
    wait: Callable[[], object],
    watches: Mapping[str, Watch] | None = None,
) -> set[str]:
    """The keys whose sign of life changes while this process watches it; all others are unchanged for `for_s`, or their own.

    `looks` read the signs, side by side, until each has changed or was unchanged for so long. `wait()` is called between two looks.
    What both raise is raised here. `watches`: those of the keys, to continue watching later.
    """
    watches, moved = defaultdict(Watch) if watches is None else watches, set[str]()
    long_s = for_s if isinstance(for_s, Mapping) else dict.fromkeys(looks, for_s)
    with ThreadPoolExecutor(_READERS) as pool:
        while left := [key for key in looks if key not in moved]:
            signs = pool.map(lambda key: looks[key](), left)
            still_s = {key: watches[key].unchanged_s(sign) for key, sign in zip(left, signs, strict=True)}
            moved |= {key for key in left if watches[key].moved}
            if all(still_s[key] >= long_s[key] for key in left if key not in moved):
                break
            wait()
    return moved


def this_process() -> str:
    """`user@host:pid`, the owner that heartbeats and leases name."""
    return f"{user_at_host()}:{os.getpid()}"


@contextlib.contextmanager
def sending_heartbeats(root: Store, flow_run_id: str) -> Iterator[None]:
    """Writes heartbeats while the context is open. A store that does not answer delays nothing."""
    key = f"{FLOW_RUNS}{flow_run_id}.json"
    owner = this_process()

    def beat() -> None:
        try:
            root.write_json(key, {"schema_version": 1, "owner": owner, "heartbeat": time.time()})
        except Exception:
            log.warning("could not write the heartbeat of flow run %s; trying again", flow_run_id, exc_info=True)

    def beat_until(over: threading.Event) -> None:
        beat()
        while not over.wait(BEAT_S):
            beat()

    try:
        with in_background(beat_until, name="flow-run-heartbeat", join_s=BEAT_S):
            yield
    finally:
        delete_heartbeat(root, flow_run_id)


def heartbeat_of(root: Store, flow_run_id: str) -> float | None:
    """Unix seconds of the last heartbeat of a flow run; None if it has ended properly or not started. Raises
    UnreadableRecord."""
    key = f"{FLOW_RUNS}{flow_run_id}.json"
    with reading(root.uri_of(key)):
        found = root.read_json_or_none(key)
        return None if found is None else float(found["heartbeat"])


def read_heartbeats(root: Store, report: Callable[[str, UnreadableRecord], None] | None = None) -> dict[str, float]:
    """Unix seconds of the last heartbeat by flow run id, for the flow runs that have not ended properly. `report` gets the id
    of a flow run whose heartbeat cannot be read, and why: treat it as alive. Without it, the error is raised."""
    found = dict[str, float]()
    for flow_run_id in [key.removeprefix(FLOW_RUNS).removesuffix(".json") for key in root.list(FLOW_RUNS)]:
        try:
            at = heartbeat_of(root, flow_run_id)
        except UnreadableRecord as odd:
            if report is None:
                raise
            report(flow_run_id, odd)
            continue
        if at is not None:
            found[flow_run_id] = at
    return found


def delete_heartbeat(root: Store, flow_run_id: str) -> None:
    """Deletes the heartbeat of an ended flow run; if that fails, collect-garbage deletes it later."""
    try:
        root.delete(f"{FLOW_RUNS}{flow_run_id}.json")
    except Exception:
        log.warning("could not delete the heartbeat of flow run %s", flow_run_id, exc_info=True)
