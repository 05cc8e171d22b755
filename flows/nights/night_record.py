"""What the store keeps of nights: one record for each, and the champion that they are compared with."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from vitline.flows.catalog.records import Origin
from vitline.flows.nights.judge import Verdict
from vitline.infra.night import Night, named_night, night_name
from vitline.infra.records import StoredRecord
from vitline.infra.runs.run_state import RunState
from vitline.infra.storage import Store

NIGHTS, CHAMPIONS = "nights", "champions"
THE_GATE = "the gate"


class GateResult(StoredRecord):
    """Whether a whole night may become the champion (`gate.py`)."""

    passed: bool
    reason: str
    """A sentence."""


class OtherScore(StoredRecord):
    """A score by a protocol that the verdict does not take."""

    name: str
    """Of the metric."""
    value: float
    """A fraction; of several seeds as one number."""
    before: dict[str, float] = Field(default_factory=dict)
    """That of the `champion`, and of `last night`, where they have it."""


class NightRecord(StoredRecord):
    """`nights/<name>/<scheduled start>.json`. A night that was not run has no pipeline."""

    schema_version: int = 1
    name: str
    """Name in the request, which the nights of one series share."""
    night: Night
    outcome: RunState | Literal["late", "skipped", "missed"]
    """The end of its pipeline, or `running`; or `late`, `skipped` because a night was still running, `missed` because nothing started."""
    reason: str = ""
    pipeline: str | None = None
    """Key of the pipeline."""
    origin: Origin = Origin()
    at: float = 0.0
    """When this was written, in Unix seconds; of a running night, when it began."""
    verdict: Verdict | None = None
    """None where it could not be made."""
    gate: GateResult | None = None
    """None for a night that is not whole."""
    part: str = ""
    """What a night does, or was doing when it ended early, in words: `evaluation with vit-paper`."""
    others: tuple[OtherScore, ...] = ()
    """The scores by all other protocols."""

    @property
    def sentence(self) -> str:
        if self.verdict is not None:
            return self.verdict.sentence
        if self.outcome == "running":
            now = f", and is in its {self.part}" if self.part else ""
            return f"Running: it began at {datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M} UTC{now}."
        if self.outcome == "skipped":
            return f"Skipped: {self.reason}"
        if self.outcome in ("late", "missed"):
            return f"Not compared: the night was {self.outcome}. {self.reason}".strip()
        where = f" (in its {self.part})" if self.part else ""
        return f"No verdict: {self.reason or self.outcome}{where}"


def last_told(nights: Sequence[NightRecord]) -> NightRecord | None:
    """Of nights, newest first, the newest that says something: neither a running one nor one that was skipped while another ran."""
    return next((night for night in nights if night.outcome not in ("running", "skipped")), None)


class ChampionRecord(StoredRecord):
    """`champions/<name>.json`: the model that nights are compared with. It is only created and swapped."""

    schema_version: int = 1
    name: str
    pipeline: str
    """Key of the pipeline that made the model."""
    model: str
    """URI of the published model; of a night with several seeds, that of the first."""
    model_digest: str
    by: str
    """Who promoted it: user@host, or `the gate`."""
    why: str
    at: float
    """Unix seconds."""
    replaces: str | None = None
    """Pipeline of the champion before."""
    counter: int = 1

    @property
    def by_hand(self) -> bool:
        return self.by != THE_GATE

    @property
    def reason(self) -> str:
        return f"{self.by}, {time.strftime('%Y-%m-%d', time.gmtime(self.at))}: {self.why}"


def night_key(name: str, night: datetime) -> str:
    return f"{NIGHTS}/{name}/{night_name(night)}.json"


def read_night(root: Store, name: str, night: datetime) -> NightRecord | None:
    """The record of a night, or None. Raises UnreadableRecord."""
    return NightRecord.load_or_none(root, night_key(name, night))


def write_night(root: Store, record: NightRecord) -> None:
    root.write_json(night_key(record.name, record.night), record.model_dump(mode="json"))


def note_night(root: Store, record: NightRecord) -> None:
    """Notes a night that was not run, unless something is known of it already."""
    record = record.model_copy(update={"at": time.time()})
    record.stored_first(root, night_key(record.name, record.night))


def nights_on_record(root: Store) -> list[tuple[str, datetime]]:
    """Name and scheduled start of the nights of which there is a record; other objects are left out."""
    parts = [key.removesuffix(".json").split("/")[1:] for key in root.list(f"{NIGHTS}/")]
    return [(part[0], night) for part in parts if len(part) == 2 and (night := named_night(part[1])) is not None]


def read_champion(root: Store, name: str) -> ChampionRecord | None:
    """The champion of a series, or None. Raises UnreadableRecord."""
    return ChampionRecord.load_or_none(root, f"{CHAMPIONS}/{name}.json")
