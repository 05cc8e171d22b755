"""The names of Prefect that it does not promise to keep. If one is gone, this says which, and flows need another way."""

import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from vitline.flows.on_prefect.prefect_private import LAST_LINE, RUN_LOG

ROOT = Path(__file__).parents[3]

NAMES = {
    "coolname.data": ("config",),
    "prefect.cli": ("app",),
    "prefect.engine": (),
    "prefect.server.database.configurations": ("SQLITE_BEGIN_MODE.get", "AioSqliteConfiguration.begin_sqlite_stmt"),
    "prefect.server.schemas.schedules": ("SCHEDULE_TYPES", "CronSchedule.get_dates", "IntervalSchedule.get_dates"),
    "prefect.utilities.engine": ("engine_logger",),
    "prefect.workers.process": ("ProcessWorker.run", "ProcessJobConfiguration.prepare_for_flow_run"),
}
TEXTS = {
    "prefect.flow_engine": (f'f"{LAST_LINE} {{',),
    "prefect.logging.loggers": (f'get_logger("{RUN_LOG}")',),
    "prefect.utilities.engine": ('get_logger("engine")',),
    "prefect.utilities.names": ("coolname.generate(",),
}
LIST = [(module, name) for module, names in NAMES.items() for name in names or ("__name__",)]


@pytest.mark.parametrize(("module", "name"), LIST)
def test_prefect_has_what_flows_and_the_local_server_need(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module} beside Prefect {version('prefect')} has no {name}"
        found = getattr(found, part)


@pytest.mark.parametrize(("module", "text"), [(module, text) for module, texts in TEXTS.items() for text in texts])
def test_prefect_logs_and_names_as_flows_expect(module, text):
    source = inspect.getsource(importlib.import_module(module))
    assert text in source, f"{module} of Prefect {version('prefect')} no longer contains {text}"


def test_prefect_prints_log_lines_by_a_console_that_can_outlive_its_pipe():
    handlers = importlib.import_module("prefect.logging.handlers")
    assert issubclass(handlers.Console, Console), f"Prefect {version('prefect')} does not print log lines with rich"
    assert hasattr(Console, "on_broken_pipe"), "rich has no Console.on_broken_pipe"


def test_one_file_of_flows_uses_such_names():
    modules = r"prefect\._|prefect\.(server|utilities|cli|engine|flow_engine)\b|coolname"
    texts = r"prefect\.flow_runs|Finished in state"
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("flows", "vit", "data_prep", "infra")
        for path in (ROOT / room).rglob("*.py")
        if re.search(f"{modules}|{texts}", path.read_text("utf-8"))
    }
    assert users == {"flows/on_prefect/prefect_private.py"}
