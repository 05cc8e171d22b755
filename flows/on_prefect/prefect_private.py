"""What flows need of Prefect that Prefect does not promise to keep. No other file of `flows` uses such names.

pyproject.toml bounds the versions, and tests/flows/on_prefect/test_prefect_private.py names what another version lacks. The server's
modules are imported inside, because they take a second to import and few processes need them.
"""

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any

from prefect.exceptions import CancelledRun, CrashedRun, FailedRun
from pydantic import TypeAdapter
from rich.console import Console

RUN_LOG = "prefect.flow_runs"
"""The logger of what a flow run itself logs; other lines of its process are those of libraries."""
ENGINE_LOG = "prefect.engine"
LAST_LINE = "Finished in state"
"""The last line that the engine logs of a flow run begins with this."""


def serve_with_write_transactions(arguments: list[str]) -> None:
    """`prefect server start`, but its transactions take SQLite's write lock when they begin."""
    from prefect.cli import app
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration

    def begin_as_writer(self: AioSqliteConfiguration, conn: Any) -> None:
        # Prefect calls it when a transaction begins. A read outside of one has no mode.
        if SQLITE_BEGIN_MODE.get() is not None:
            conn.exec_driver_sql("BEGIN IMMEDIATE")

    AioSqliteConfiguration.begin_sqlite_stmt = begin_as_writer  # type: ignore[method-assign]
    sys.argv[1:] = ["server", "start", *arguments]
    app()


def start_dates(schedule: Any, after: datetime, until: datetime, most: int) -> list[datetime]:
    """When a schedule has runs due, at most so many. `schedule` is one of Prefect's client, whose classes compute no dates."""
    from prefect.server.schemas.schedules import SCHEDULE_TYPES

    known = TypeAdapter[Any](SCHEDULE_TYPES).validate_python(schedule.model_dump())
    return asyncio.run(known.get_dates(n=most, start=after, end=until))


def flow_process_command() -> str:
    """Runs the flow run of the environment's PREFECT__FLOW_RUN_ID, without a process in between that fetches code."""
    return shlex.join([sys.executable, "-P", "-m", "prefect.engine"])


def filter_engine_log() -> None:
    """Keeps Prefect's engine from logging, after the final message of a flow, a traceback of its own code or an outdated
    state."""
    for name in (RUN_LOG, ENGINE_LOG):
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # If the worker ends a run, the engine logs its state before that.
    if record.getMessage().startswith(f"{LAST_LINE} Running("):
        return False
    # A flow that returns a failed state has logged the reason. The engine then raises that state and logs the traceback.
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun | CrashedRun | CancelledRun))


def outlive_the_worker() -> None:
    """Keeps this process running when its output pipe breaks, as when the worker that started it was killed.

    Prefect prints log lines with rich, which ends the process when the pipe is broken. Prefect's API has the lines anyway.
    """

    def discard_output(console: Console) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(null, number)

    Console.on_broken_pipe = discard_output  # type: ignore[assignment]


def named_by_server(name: str) -> bool:
    """Whether it is an `adjective-animal` of Prefect's server, which makes names with coolname."""
    first, _, second = name.partition("-")
    return first in _words("adj_any") and second in _words("subj")


@cache
def _words(part: str) -> frozenset[str]:
    from coolname import data

    known: Mapping[str, Any] = data.config
    return frozenset(known[part]["words"] if "words" in known[part] else chain(*map(_words, known[part]["lists"])))
