"""The Prefect server of the local stack: `prefect server start`, but its transactions take SQLite's write lock when they begin.

Prefect begins them as readers. SQLite then refuses to let one write, at once and whatever the busy timeout, if another has
written since: "database is locked", and a change of state is lost (PrefectHQ/prefect, issues 10188 and 17473). It was seen at two of three
starts of a stack with earlier runs, when all services of the server look for work at the same time.

    python -m vitline.flows.on_prefect.local_server --host=127.0.0.1 --port=4200
"""

import sys

from vitline.flows.on_prefect.prefect_private import serve_with_write_transactions

if __name__ == "__main__":
    serve_with_write_transactions(sys.argv[1:])
