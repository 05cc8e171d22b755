"""The Prefect server of the local stack: `prefect server start`, but its transactions take SQLite's write lock when they begin.

Prefect begins them as readers. SQLite then refuses to let one write, at once and whatever the busy timeout, if another has
written since: "database is locked", and a change of state is lost (PrefectHQ/prefect, issues 10188 and 17473). It was seen at two of three
starts of a stack with earlier runs, when all services of the server look for work at the same time.

    python -m vitline.flows.on_prefect.local_server --host=127.0.0.1 --port=4200
"""

import sys

import sqlalchemy as sa
from prefect.cli import app
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration


def begin_as_writer(self: AioSqliteConfiguration, conn: sa.Connection) -> None:
    """What Prefect calls at the begin of a transaction; a read outside of one has no mode."""
    if SQLITE_BEGIN_MODE.get() is not None:
        conn.exec_driver_sql("BEGIN IMMEDIATE")


if __name__ == "__main__":
    AioSqliteConfiguration.begin_sqlite_stmt = begin_as_writer  # type: ignore[method-assign]
    sys.argv[1:1] = ["server", "start"]
    app()
