"""Text without secrets, for whatever leaves this project for another system's records (DESIGN 3.8)."""

import re
from collections.abc import Iterable

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
