"""What CI runs after the demo: no server of the local stack may have logged a traceback.

.venv/bin/python tests/end_to_end/check_server_logs.py [FOLDER]
"""

import sys
from pathlib import Path

from vitline.infra.local.service_logs import unexplained_tracebacks

if __name__ == "__main__":
    problems = unexplained_tracebacks(Path(sys.argv[1] if len(sys.argv) > 1 else ".vitline/logs"))
    print("\n".join(problems) or "no traceback in the logs of the servers")
    sys.exit(bool(problems))
