"""Leases: the right to write a run, decided by conditional writes in the store.

`lease.json` names one attempt. It is created if absent, and replaced by compare-and-swap only if the job of that attempt has
ended in Ray, or if Ray does not know the job and its counter was unchanged for the time-out while the contender watched it.
This one mechanism covers duplicate requests, resuming, zombie processes and overlapping nights. No clocks are compared.

The holder writes a heartbeat every 10 s. It checks the lease before it saves, commits a checkpoint, seals its journal, writes progress,
publishes a model or writes its state. A process may be suspended between the check and the write, so that write is conditional or has
a name of its own: `config.json` of a model and manifests of checkpoints are created if absent, `state.json` and `reconciled.json` are
swapped, files of a model are named by their content, files of a checkpoint by their save.
"""

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from typing import Self

from pydantic import PositiveInt

from vitline.infra.config import digest_of, replace
from vitline.infra.records import StoredRecord, reading
from vitline.infra.runs.liveness import Watch
from vitline.infra.storage import PreconditionFailed, Store, json_bytes

log = logging.getLogger(__name__)

_KEY = "lease.json"
_TERMINAL = ("succeeded", "failed", "stopped")
_MAX_RACES = 20


class Lease(StoredRecord):
    """The attempt that may write a run."""

    schema_version: int = 1
    run_key: str
    attempt: PositiveInt
    """Number of the attempt, from 1; part of the names of its checkpoints and journals."""
    job_id: str
    """Ray submission id, as `job_id_of` makes it."""
    owner: str
    """The flow run or command that took the lease."""
    page: str | None = None
    """Web page of the owner."""
    began: float = 0.0
    """When the attempt took the lease, in Unix seconds by the clock of its holder, for people."""
    heartbeat: float
    """Time of the last heartbeat, in Unix seconds by the clock of the holder, for people; 0 once the lease was released."""
    nonce: str
    """Different at every write, because equal bytes may have equal tags on S3."""
    counter: int
    """Number of writes since the first lease."""

    @property
    def life(self) -> Hashable:
        """Moves with every heartbeat, whatever the clocks say; a `Watch` looks at it."""
        return self.attempt, self.counter


class LeaseHeld(RuntimeError):
    """An attempt that is or may be alive holds the lease; `.lease` names it."""

    def __init__(self, lease: Lease, why: str) -> None:
        super().__init__(f"{lease.run_key} is held by attempt {lease.attempt} of {lease.owner}: {why}.")
        self.lease = lease


class LeaseLost(RuntimeError):
    """This attempt does not hold the lease any more. It must stop and write nothing to the run."""


def acquire_lease(
    run: Store,
    run_key: str,
    *,
    job_state: Callable[[str], str | None],
    owner: str,
    page: str | None = None,
    lease_timeout_s: float = 60,
    watch: Watch | None = None,
) -> Lease:
    """Takes the lease on `run`, the folder of a run, for a new attempt.

    `job_state(job id)` returns "pending", "running", "succeeded", "failed", "stopped", or None if Ray does not know the
    job. Its exceptions are raised here, because a job server that does not answer does not show that a job has ended.
    Raises LeaseHeld while the current attempt is or may be alive. A caller that wants the lease of an attempt whose job Ray
    does not know calls again and again with the same `watch`, until the heartbeat was unchanged for `lease_timeout_s`.
    """
    watch = watch or Watch()
    nonce = uuid.uuid4().hex
    for _ in range(_MAX_RACES):
        held, tag = _read(run)
        if held and held.nonce == nonce:  # an earlier try of this write succeeded, but its reply was lost
            return held
        if held:
            _require_dead(held, job_state(held.job_id), lease_timeout_s, watch)
        attempt = held.attempt + 1 if held else 1
        lease = Lease(
            run_key=run_key,
            attempt=attempt,
            job_id=job_id_of(run, run_key, attempt),
            owner=owner,
            page=page,
            began=time.time(),
            heartbeat=time.time(),
            nonce=nonce,
            counter=held.counter + 1 if held else 0,
        )
        with contextlib.suppress(PreconditionFailed):
            run.create_or_swap(_KEY, json_bytes(lease), tag)
            return lease
    raise RuntimeError(
        f"{run.uri_of(_KEY)} changed {_MAX_RACES} times in a row. Check whether an old attempt still writes heartbeats."
    )


class LeaseHolder:
    """The lease of a running attempt. A thread writes heartbeats while the context is open.

    Call `check()` before anything is published. Entering the context raises LeaseLost if the attempt has no lease. A
    heartbeat that cannot be written is tried again after `every_s`. `lost` and the next `check()` show that the lease was
    lost.
    """

    def __init__(self, run: Store, attempt: int, every_s: float = 10.0) -> None:
        self.run, self.attempt, self._every_s = run, attempt, every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False

    def check(self) -> Lease:
        """The current lease. Raises LeaseLost if another attempt holds it."""
        return self._read_own()[0]

    def beat(self) -> Lease:
        """Writes a heartbeat. Raises LeaseLost if another attempt holds the lease."""
        return self._write(time.time())

    def release(self) -> None:
        """Sets the heartbeat to 0, so that the next attempt can take the lease at once."""
        self._stop.set()
        self._write(0.0)

    def _write(self, heartbeat: float) -> Lease:
        nonce = uuid.uuid4().hex
        for _ in range(_MAX_RACES):
            lease, tag = self._read_own()
            if lease.nonce == nonce:  # an earlier try of this write succeeded, but its reply was lost
                return lease
            beaten = replace(lease, heartbeat=heartbeat, nonce=nonce, counter=lease.counter + 1)
            # Another thread of this attempt, or the next attempt, may write first: then the lease is read again.
            with contextlib.suppress(PreconditionFailed):
                self.run.compare_and_swap(_KEY, json_bytes(beaten), tag)
                return beaten
        raise RuntimeError(
            f"{self.run.uri_of(_KEY)} changed {_MAX_RACES} times in a row. Check whether two processes write heartbeats."
        )

    def __enter__(self) -> Self:
        self.beat()
        self._thread = threading.Thread(target=self._beat_on, name="lease-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _read_own(self) -> tuple[Lease, str]:
        lease, tag = _read(self.run)
        if lease is None or tag is None or lease.attempt != self.attempt:
            self.lost = True
            now = f"attempt {lease.attempt} of {lease.owner}" if lease else "nobody"
            raise LeaseLost(
                f"attempt {self.attempt} lost the lease {self.run.uri_of(_KEY)}: {now} holds it. "
                "This attempt must stop and write nothing more."
            )
        return lease, tag

    def _beat_on(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.beat()
            except LeaseLost as error:
                log.error("%s", error)
                return
            except Exception:
                log.warning("attempt=%d: the heartbeat could not be written; trying again", self.attempt, exc_info=True)


@contextlib.contextmanager
def held(run: Store, lease: Lease, every_s: float) -> Iterator[LeaseHolder]:
    """Holds a lease for work of this process, and releases it at the end, whatever that is."""
    holder = LeaseHolder(run, lease.attempt, every_s)
    try:
        with holder:
            yield holder
    finally:  # also where a signal ends the process in its first heartbeat; behind its last one, which would undo it
        with contextlib.suppress(LeaseLost, OSError, RuntimeError):
            holder.release()


def job_id_of(run: Store, run_key: str, attempt: int) -> str:
    """`<run key>-<8 hex>-a<attempt>`, with the digest of the run's URI: several roots may use one Ray, and have equal run keys."""
    return f"{run_key}-{digest_of(run.uri)[:8]}-a{attempt}"


def read_lease(run: Store) -> Lease | None:
    """The current lease on a run; None if there never was one."""
    return _read(run)[0]


def lease_version(run: Store) -> Hashable:
    """`Lease.life` of the current lease; None if there never was one."""
    lease = read_lease(run)
    return lease and lease.life


def _read(run: Store) -> tuple[Lease | None, str | None]:
    data, tag = run.read_tagged_or_none(_KEY)
    if data is None:
        return None, None
    with reading(run.uri_of(_KEY)):
        return Lease.model_validate(json.loads(data)), tag


def _require_dead(lease: Lease, state: str | None, lease_timeout_s: float, watch: Watch) -> None:
    unchanged_s = watch.unchanged_s(lease.life)
    released = lease.heartbeat == 0.0
    if state in _TERMINAL or (state is None and (released or unchanged_s > lease_timeout_s)):
        return
    why = f"Ray says that job {lease.job_id} is {state}"
    if state is None:
        why = (
            f"Ray does not know job {lease.job_id}, and its heartbeat has been unchanged for {unchanged_s:.0f} s, less than the "
            f"time-out of {lease_timeout_s:g} s"
        )
    raise LeaseHeld(lease, why)
