"""What a root holds at one moment: its runs and pipelines, from one listing and their small records.

A snapshot only nominates: before something is repaired, ended or deleted, it is read from the store again.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeVar

from vitline.flows.catalog.records import PipelineRecord, list_pipeline_keys, read_pipeline
from vitline.flows.catalog.stored_configs import RunFile
from vitline.infra.records import UnreadableRecord, read_each, read_or_why
from vitline.infra.runs.lease import Lease, read_lease
from vitline.infra.runs.run_state import NO_STATE, RunStateRecord, has_ended, read_state, read_stop
from vitline.infra.runs.segments import journal_keys
from vitline.infra.storage import Keys, Store, cached_records

Kind = Literal["run", "pipeline"]
T = TypeVar("T")


@dataclass(frozen=True)
class StoredRun:
    """A run at the moment of the snapshot."""

    key: str
    store: Store
    """The folder of the run, as it is now."""
    records: Store
    """The folder of the run as the snapshot lists it, for small records."""
    keys: Keys
    """The listed keys below the folder; in a snapshot all."""
    lease: Lease | None
    """None also where the snapshot was read without leases."""
    state: RunStateRecord | None

    @classmethod
    def read(cls, store: Store, records: Store, keys: Keys, *, leases: bool = False) -> Self:
        """Raises UnreadableRecord."""
        if leases:
            read_stop(records)  # what the reconciled state of a silent attempt follows from
        key = store.uri.rpartition("/")[2]
        return cls(key, store, records, keys, read_lease(records) if leases else None, read_state(records))

    @property
    def attempts(self) -> int:
        """The number of the newest attempt that was submitted; 0 before the first."""
        names = (key.removeprefix("attempts/a") for key in self.keys if key.startswith("attempts/a"))
        numbers = (name.removesuffix(".json") for name in names)
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    @property
    def ended(self) -> bool:
        """Whether the attempt that holds the lease has written how it ended."""
        return has_ended(self.state, self.lease.attempt if self.lease else 0)

    @property
    def updated_at(self) -> float:
        """When its state was written, in Unix seconds; 0 before."""
        return (self.state or NO_STATE)["updated_at"]

    @property
    def finished_at(self) -> float | None:
        """When the attempt that holds the lease finished the run; None if it did not, or was followed by another."""
        if self.state is None or self.lease is None or self.state["state"] != "finished":
            return None
        return self.state["updated_at"] if self.state["attempt"] == self.lease.attempt else None

    @property
    def last_life(self) -> float:
        """The newest time that its lease or state shows."""
        return max(self.updated_at, self.lease.heartbeat if self.lease else 0.0)

    def life(self) -> object:
        """Changes with every heartbeat. Always read from the store, for checks right before something is ended or deleted."""
        lease = read_lease(self.store)
        return lease and [lease.attempt, lease.counter]

    @property
    def checkpoints(self) -> Keys:
        """The keys below its `checkpoints/`."""
        return [key for key in self.keys if key.startswith("checkpoints/") and key.count("/") > 1]

    @property
    def journal(self) -> Keys:
        """The objects of its journal."""
        return journal_keys(self.keys)

    def config(self) -> RunFile:
        """Its `config.json`, not validated."""
        config: RunFile = self.records.read_json("config.json")
        return config


@dataclass(frozen=True)
class StoredPipeline:
    """A pipeline at the moment of the snapshot."""

    record: PipelineRecord
    lease: Lease | None
    """None also where the snapshot was read without leases."""


@dataclass(frozen=True)
class Unreadable:
    """A run or pipeline with an unreadable record. Treat it as alive."""

    kind: Kind
    key: str
    error: UnreadableRecord


@dataclass(frozen=True)
class RootSnapshot:
    """The runs and pipelines of a root by key, and those that cannot be read."""

    root: Store
    runs: Mapping[str, StoredRun]
    """Those that have a config, unless `unconfigured` was asked for."""
    pipelines: Mapping[str, StoredPipeline]
    unreadable: Sequence[Unreadable]

    @classmethod
    @contextlib.contextmanager
    def read(
        cls,
        root: Store,
        kinds: Sequence[Kind] = ("run", "pipeline"),
        *,
        leases: bool = False,
        unconfigured: bool = False,
    ) -> Iterator[Self]:
        """The snapshot of a root, or of its runs or pipelines alone. What is read of a run within the context is read as the
        snapshot lists it; on a store that is far away, most of it without a request (`cached_records`). `unconfigured`: also
        what is below `runs/` without a config, such as a run of which half was deleted."""
        prefixes = [f"{kind}s/" for kind in kinds] + ["leases/"] * (leases and "pipeline" in kinds)
        with cached_records(root, *prefixes) as records:
            unreadable = list[Unreadable]()
            found = _keys_by_run(records, unconfigured) if "run" in kinds else {}

            def run(key: str) -> StoredRun:
                folder = f"runs/{key}"
                return StoredRun.read(root.child(folder), records.child(folder), found[key], leases=leases)

            def pipeline(key: str) -> StoredPipeline:
                lease = read_lease(records.child(f"leases/{key}")) if leases else None
                return StoredPipeline(read_pipeline(records, key), lease)

            runs = _read_known("run", [*found], run, unreadable)
            keys = list_pipeline_keys(records) if "pipeline" in kinds else []
            pipelines = _read_known("pipeline", keys, pipeline, unreadable)
            yield cls(root, runs, pipelines, unreadable)


def _keys_by_run(records: Store, unconfigured: bool) -> dict[str, Keys]:
    """The keys below the folder of each run."""
    found = dict[str, Keys]()
    for key in records.list("runs/"):
        _, run, *inside = key.split("/", 2)
        found.setdefault(run, []).extend(inside)
    return {run: keys for run, keys in found.items() if "config.json" in keys or (unconfigured and keys)}


def _read_known(
    kind: Kind, keys: Sequence[str], read: Callable[[str], T], unreadable: list[Unreadable]
) -> dict[str, T]:
    """What `read` makes of each key. One that cannot be read goes to `unreadable` and stops no other."""
    known = dict[str, T]()
    for key, found in zip(keys, read_each(keys, partial(read_or_why, read)), strict=True):
        if isinstance(found, UnreadableRecord):
            unreadable.append(Unreadable(kind, key, found))
        else:
            known[key] = found
    return known
