"""What CI runs after the demo: no server of the local stack may have logged a traceback.

.venv/bin/python tests/end_to_end/check_server_logs.py [FOLDER]
"""

import sys
from pathlib import Path

from vitline.infra.local.service_logs import logged_errors

KNOWN = "database is locked"
"""Of a traceback that needs no action: Prefect's background tasks block each other in SQLite, and Prefect retries them (its issue
23051)."""


def unexplained_tracebacks(folder: Path) -> list[str]:
    """One line for each other traceback in the logs of `folder`."""
    return [
        f"{log.name}: {error.times} x {error.text}"
        for log in sorted(folder.glob("*.log*"))
        for error in logged_errors(log)
        if error.traceback and KNOWN not in error.text
    ]


if __name__ == "__main__":
    problems = unexplained_tracebacks(Path(sys.argv[1] if len(sys.argv) > 1 else ".vitline/logs"))
    print("\n".join(problems) or "no traceback in the logs of the servers")
    sys.exit(bool(problems))
