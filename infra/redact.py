"""Removes secrets from texts that are recorded in MLflow, Prefect, the store and logs of jobs (`SECURITY.md`)."""

import logging
import re
from collections.abc import Iterable

from vitline.infra.settings import secret_values

HIDDEN = "***"
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/?#@\s\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&][^=&\s\"'<>]*(?:key|secret|token|password|signature|credential|auth)[^=&\s\"'<>]*=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with the user part of URIs removed, and with signed queries and each of `secrets` replaced by `***`.

    A URI that was changed is not usable any more. Nothing else changes.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(r"\1", text))


def cleaned(text: str) -> str:
    """`text` without the secrets of this process; see `redact` and `secret_values`."""
    return redact(text, secret_values())


def holds_credentials(uri: str) -> bool:
    """True if a URI has a user part or a signed query, which would become visible in records."""
    return redact(uri) != uri


class CleanFormatter(logging.Formatter):
    """Removes secrets from log lines and their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return cleaned(super().format(record))


def log_to_stderr() -> None:
    """Sets up the log of a job driver or the sender: to stderr, without secrets."""
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
