"""Text without secrets, for whatever goes into records: MLflow's, Prefect's, the store's, the jobs' logs (DESIGN 3.8)."""

import logging
import re
from collections.abc import Iterable

from infra.settings import secret_values

HIDDEN = "***"
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/?#@\s\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&][^=&\s\"'<>]*(?:key|secret|token|password|signature|credential|auth)[^=&\s\"'<>]*=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the user part of URIs, without signed queries, and with each of `secrets` hidden.

    The result is no usable URI where something was taken out; nothing else changes.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(r"\1", text))


def cleaned(text: str) -> str:
    """`text` without what this process must not let out: see `redact` and `secret_values`."""
    return redact(text, secret_values())


def holds_credentials(uri: str) -> bool:
    """Whether a URI has a user part or a signed query: both would be kept in records, where all can read them."""
    return redact(uri) != uri


class CleanFormatter(logging.Formatter):
    """Of log lines, and of the tracebacks below them."""

    def format(self, record: logging.LogRecord) -> str:
        return cleaned(super().format(record))


def log_to_stderr() -> None:
    """The log of a process that people read later: a job driver, the shipper."""
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
