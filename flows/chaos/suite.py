"""Which scenarios there are, running them one after another, and their report."""

import json
import logging
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.faults import (
    checkpoint_faults,
    claim_faults,
    cluster_faults,
    data_faults,
    node_faults,
    process_faults,
    server_faults,
    store_faults,
)
from vitline.flows.chaos.scenario import Result, Scenario
from vitline.flows.console import utc
from vitline.infra.names import there_are
from vitline.infra.redact import cleaned
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store

FAMILIES: tuple[ModuleType, ...] = (
    claim_faults,
    process_faults,
    checkpoint_faults,
    data_faults,
    store_faults,
    cluster_faults,
    node_faults,
    server_faults,
)
SCENARIOS: dict[str, Scenario] = {
    each.name: each for family in FAMILIES for each in vars(family).values() if isinstance(each, Scenario)
}
FOLDER, WORK = "chaos", "work"
_WORK_OF = re.compile(r"(\d{10})-[0-9a-f]{8}/" + WORK + "/.+")
DAY_S = 86_400.0
MOST_CHARACTERS = 1_000


class Report(NamedTuple):
    """What became of every promise, and where that is written."""

    results: list[Result]
    root: str
    started_at: float
    uri: str
    """The folder with report.json and report.md."""

    @property
    def is_kept(self) -> bool:
        """Whether no promise was found broken."""
        return all(result.verdict != "broken" for result in self.results)

    @property
    def summary(self) -> str:
        """`12 promises: 10 kept, 2 not tried`"""
        counts = Counter(result.verdict for result in self.results)
        found = ", ".join(
            f"{counts[verdict]} {verdict}" for verdict in ("kept", "broken", "not tried") if counts[verdict]
        )
        return f"{len(self.results)} promise{'s' * (len(self.results) != 1)}: {found}"


def choose(names: Sequence[str]) -> list[Scenario]:
    """The named scenarios, all without a name. Raises ValueError for a name that there is not."""
    for name in names:
        if name not in SCENARIOS:
            raise ValueError(f"There is no scenario {name!r}; {there_are(name, SCENARIOS)}")
    return [SCENARIOS[name] for name in dict.fromkeys(names)] or list(SCENARIOS.values())


def run_suite(
    settings: Settings, scenarios: Sequence[Scenario], out: str | None, show: Callable[[Result], None]
) -> Report:
    """Runs scenarios one after another below `<root>/chaos/`, where only the report stays; `show` gets each result at once.

    `out`: the folder of the report, if not there. What a killed chaos run left is deleted a day after its start.
    """
    started_at, chaos = time.time(), open_store(settings.root).child(FOLDER)
    delete_left_work(chaos, before=started_at - DAY_S)
    place = chaos.child(f"{int(started_at)}-{uuid.uuid4().hex[:8]}")
    work, results = place.child(WORK), list[Result]()
    bench = Bench(settings, work)
    try:
        for each in scenarios:
            with quiet():
                result = each.run(bench)
            results.append(result._replace(found=" ".join(cleaned(result.found).split())[:MOST_CHARACTERS]))
            show(results[-1])
    finally:
        bench.close()
        delete_all(work)
        report = Report(results, settings.root, started_at, open_store(out).uri if out else place.uri)
        write_report(report)
    return report


def write_report(report: Report) -> None:
    """report.json and report.md, with what was observed."""
    store = open_store(report.uri)
    record = {
        "schema_version": 1,
        "vitline": version("vitline"),
        "root": report.root,
        "started_at": report.started_at,
        "results": [result._asdict() for result in report.results],
    }
    store.write("report.json", json.dumps(record, indent=1).encode())
    rows = [
        [result.verdict, result.name, result.fault, result.promise, result.found, f"{result.seconds:g}"]
        for result in report.results
    ]
    columns = ["verdict", "scenario", "fault", "promise", "found", "seconds"]
    lines = [columns, ["---"] * len(columns), *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    title = f"# Promises at {report.root}\n\n{report.summary}. vitline {record['vitline']}, {utc(report.started_at)}."
    store.write("report.md", f"{title}\n\n{table}\n".encode())


def delete_left_work(chaos: Store, before: float) -> None:
    """Deletes the work, not the reports, of chaos runs that began earlier."""
    for key in chaos.list():
        if (found := _WORK_OF.fullmatch(key)) and int(found[1]) < before:
            chaos.delete(key)


def delete_all(work: Store) -> None:
    for key in work.list():
        work.delete(key)
    work.discard_leftovers(0)
    if work.uri.startswith("file://"):
        shutil.rmtree(work.uri.removeprefix("file://"), ignore_errors=True)  # folders, and the files of locks


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings and errors of faults that are made on purpose are no news: the report says what came of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
