"""Writes the curves of the runs that a flow or command follows to the readers that the settings name, beside the work."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Self

from vitline.flows.curves.event_files import EventFiles
from vitline.flows.curves.journal_points import Curves
from vitline.flows.curves.wandb_runs import WandbRun
from vitline.infra.runs.beside import beside
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)
POLL_S = 15.0
Reader = Callable[[Store, str], Curves]
"""Opens the curves of a run, by its store and key, at a reader."""


def readers(settings: Settings) -> dict[str, Reader]:
    """The readers that the settings name, by what a warning calls them."""
    found = dict[str, Reader]()
    if (folder := settings.tensorboard) is not None:
        found[str(folder)] = lambda run, key: EventFiles(run, folder / key)
    if (project := settings.wandb) is not None:
        found[f"the project {project} of Weights & Biases"] = lambda run, key: WandbRun(run, key, project)
    return found


class CurveWriter:
    """Context that writes the curves of the runs that `follow` names, from a thread. Does nothing without readers. What goes wrong at a
    reader is logged once and disturbs nothing: it is tried again later, but not at the end, which would wait for it."""

    def __init__(self, root: str, readers: Mapping[str, Reader]) -> None:
        self._root, self._readers = root, readers
        self._going = dict[tuple[str, str], Curves]()
        self._lock, self._logged, self._failing = threading.Lock(), set[str](), set[str]()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._readers:
            self._stack.enter_context(beside(self._write_on, name="curves"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for (reader, _key), curves in self._going.items():
            if reader not in self._failing:
                self._try(reader, curves.write)
            self._try(reader, curves.close)

    def follow(self, key: str) -> None:
        """Writes the curves of this run, and what it adds, until the context ends."""
        run = open_store(self._root).child(f"runs/{key}") if self._readers else None
        with self._lock:
            for name, reader in self._readers.items():
                if run is not None and (name, key) not in self._going:
                    self._going[name, key] = reader(run, key)

    def _write_on(self, over: threading.Event) -> None:
        while not over.wait(POLL_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            going = list(self._going.items())
        for (reader, _key), curves in going:
            self._try(reader, curves.write)

    def _try(self, reader: str, action: Callable[[], object]) -> None:
        """Logs the first fault of a reader: its disk is full, its server or the store is away, its package is missing."""
        try:
            action()
            self._failing.discard(reader)
        except Exception:
            if reader not in self._logged:
                log.warning("curves could not be written to %s", reader, exc_info=True)
            self._logged.add(reader)
            self._failing.add(reader)
