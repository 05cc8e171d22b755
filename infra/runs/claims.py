"""Who may write a run, decided in the store by conditional writes (DESIGN 3.3).

`claim.json` names one attempt. It is created if absent and replaced by compare-and-set, and only when the attempt it
names has ended in Ray, or Ray does not know it and its heartbeat is older than the time-out. One mechanism for
duplicates, resume, fencing of zombies and overlap of nights. Heartbeats are compared with this machine's clock, so
clocks may differ by much less than the time-out.
"""

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self

from pydantic import PositiveInt

from infra.config import FrozenConfig, replace
from infra.storage import PreconditionFailed, Store, json_bytes

log = logging.getLogger(__name__)

_KEY = "claim.json"
_TERMINAL = ("succeeded", "failed", "stopped")
_MAX_RACES = 20


class Claim(FrozenConfig):
    """The attempt that may write a run."""

    schema_version: int = 1
    run_key: str
    attempt: PositiveInt
    """Numbered from 1; part of every checkpoint and journal name."""
    job_id: str
    """Ray submission id, `<run key>-a<attempt>`."""
    owner: str
    """Who took the claim: a flow run, a person's shell."""
    page: str | None = None
    """Where people can watch the owner at work."""
    heartbeat: float
    """Unix seconds of the last sign of life."""
    nonce: str
    """New at every write: equal bytes would have equal tags on S3."""
    counter: int
    """Writes since the run began."""


class ClaimHeld(RuntimeError):
    """A living attempt holds the claim; `.claim` says which."""

    def __init__(self, claim: Claim, why: str) -> None:
        super().__init__(f"{claim.run_key} is held by attempt {claim.attempt} of {claim.owner}: {why}.")
        self.claim = claim


class ClaimLost(RuntimeError):
    """This attempt may not write any more: stop, and leave the run as it is."""


def take_claim(
    run: Store,
    run_key: str,
    *,
    job_state: Callable[[str], str | None],
    owner: str,
    page: str | None = None,
    claim_timeout_s: float = 60,
) -> Claim:
    """The claim of a new attempt on `run`, the folder of the run.

    `job_state(job id)` is "pending", "running", "succeeded", "failed", "stopped", or None where Ray does not know the
    job; what it raises goes on to the caller, since a job server that does not answer proves nothing.
    Raises ClaimHeld while the present attempt is alive, or may be.
    """
    nonce = uuid.uuid4().hex
    for _ in range(_MAX_RACES):
        held, tag = _read(run)
        if held and held.nonce == nonce:  # the write was refused, yet had arrived: its first reply was lost
            return held
        if held:
            _require_dead(held, job_state(held.job_id), claim_timeout_s)
        attempt = held.attempt + 1 if held else 1
        claim = Claim(
            run_key=run_key,
            attempt=attempt,
            job_id=f"{run_key}-a{attempt}",
            owner=owner,
            page=page,
            heartbeat=time.time(),
            nonce=nonce,
            counter=held.counter + 1 if held else 0,
        )
        with contextlib.suppress(PreconditionFailed):
            _ = run.compare_and_swap(_KEY, json_bytes(claim), tag) if tag else run.create(_KEY, json_bytes(claim))
            return claim
    raise RuntimeError(f"{run.uri_of(_KEY)} changed {_MAX_RACES} times in a row. Does a stopped attempt still beat?")


class ClaimHolder:
    """Held by a running attempt: `check()` before anything is published, heartbeats while the context is open.

    Entering raises ClaimLost if the attempt has no claim. A heartbeat that cannot be written is tried again at the
    next turn; the loss of the claim shows in `lost` and in the next `check()`.
    """

    def __init__(self, run: Store, attempt: int, every_s: float = 10.0) -> None:
        self._run, self._attempt, self._every_s = run, attempt, every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False

    def check(self) -> Claim:
        """The claim as it stands in the store. Raises ClaimLost if it is not this attempt's."""
        return self._read_own()[0]

    def beat(self) -> Claim:
        """Write a sign of life. Raises ClaimLost if the claim is not this attempt's any more."""
        nonce = uuid.uuid4().hex
        for _ in range(_MAX_RACES):
            claim, tag = self._read_own()
            if claim.nonce == nonce:
                return claim
            beaten = replace(claim, heartbeat=time.time(), nonce=nonce, counter=claim.counter + 1)
            with contextlib.suppress(
                PreconditionFailed
            ):  # another thread of this attempt, or a successor: read who it was
                self._run.compare_and_swap(_KEY, json_bytes(beaten), tag)
                return beaten
        raise RuntimeError(f"{self._run.uri_of(_KEY)} changed {_MAX_RACES} times in a row. Do two processes beat?")

    def release(self) -> None:
        """Let the next one take the claim at once: the heartbeat of this attempt becomes as old as can be."""
        self._stop.set()
        for _ in range(_MAX_RACES):
            claim, tag = self._read_own()
            with contextlib.suppress(PreconditionFailed):
                let_go = replace(claim, heartbeat=0.0, nonce=uuid.uuid4().hex, counter=claim.counter + 1)
                self._run.compare_and_swap(_KEY, json_bytes(let_go), tag)
                return

    def __enter__(self) -> Self:
        self.beat()
        self._thread = threading.Thread(target=self._beat_on, name="claim-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _read_own(self) -> tuple[Claim, str]:
        claim, tag = _read(self._run)
        if claim is None or tag is None or claim.attempt != self._attempt:
            self.lost = True
            now = f"attempt {claim.attempt} of {claim.owner}" if claim else "nobody"
            raise ClaimLost(
                f"attempt {self._attempt} lost {self._run.uri_of(_KEY)}: {now} holds it. "
                "Nothing more may be written by this attempt."
            )
        return claim, tag

    def _beat_on(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.beat()
            except ClaimLost as error:
                log.error("%s", error)
                return
            except Exception:
                log.warning("no heartbeat of attempt %d; trying again", self._attempt, exc_info=True)


def read_claim(run: Store) -> Claim | None:
    """The claim on a run as it stands; None where nobody ever took one."""
    return _read(run)[0]


def _read(run: Store) -> tuple[Claim | None, str | None]:
    try:
        data, tag = run.read_tagged(_KEY)
    except FileNotFoundError:
        return None, None
    return Claim.model_validate(json.loads(data)), tag


def _require_dead(claim: Claim, state: str | None, claim_timeout_s: float) -> None:
    age_s = time.time() - claim.heartbeat
    if state in _TERMINAL or (state is None and age_s > claim_timeout_s):
        return
    why = f"Ray says that job {claim.job_id} is {state}"
    if state is None:
        why = f"Ray does not know job {claim.job_id}, but its heartbeat is {age_s:.0f} s old, of {claim_timeout_s:g} s"
    raise ClaimHeld(claim, why)
