"""The certificates of a private authority, for the clients of stores, Prefect, MLflow and Ray's job server.

A client trusts the file that one of VARIABLES names, or else the public authorities. VITLINE_CA adds an authority for all clients.
"""

import contextlib
import functools
import hashlib
import os
import ssl
import tempfile
from pathlib import Path

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE", "PREFECT_API_SSL_CERT_FILE")
"""Prefect reads SSL_CERT_FILE only when it is imported, but its own variable also when its settings are refreshed."""
CERTIFICATE_ADVICE = "Set VITLINE_CA to a file with the certificates of your authority."
"""For errors: the next step where a client does not accept the certificate of a server."""
_BEGIN = "-----BEGIN CERTIFICATE-----"
_PREFIX = "vitline-authorities-"


def checked_authority(name: str, value: str) -> str:
    """VITLINE_CA, or the key in a file that is called `name`. Raises ValueError if it has no certificates."""
    try:
        _certificates(value)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name} is {value[:200]}, which is no PEM file with certificates of an authority ({why}). Name such a file, or unset it."
        ) from None
    return value


def authority_of_jobs() -> dict[str, str]:
    """VITLINE_CA for a job: its text, as a path of this machine means nothing on a node."""
    value = os.environ.get("VITLINE_CA")
    return {"VITLINE_CA": _certificates(value)} if value else {}


def own_certificates() -> bytes | None:
    """The PEM text of SSL_CERT_FILE, for a client that does not read the variables itself."""
    path = os.environ.get("SSL_CERT_FILE")
    return Path(path).read_bytes() if path else None


def named_files() -> dict[str, str]:
    """The files with certificates that variables of this process name."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def trust_own_authority() -> None:
    """Adds the certificates of VITLINE_CA to those that each of VARIABLES names, or to the public ones, for this process and its
    children. Nothing changes where VITLINE_CA cannot be read: `Settings` refuses it."""
    value = os.environ.get("VITLINE_CA")
    if not value:
        return
    try:
        own = _certificates(value)
    except (OSError, ValueError):
        return
    if own != value:  # children may run in another folder
        os.environ["VITLINE_CA"] = str(Path(value).expanduser().absolute())
    import certifi

    for name in VARIABLES:
        path = Path(os.environ.get(name) or os.environ.get(VARIABLES[0]) or certifi.where())
        if path.name.startswith(_PREFIX) and not path.exists():
            path = Path(certifi.where())
        with contextlib.suppress(OSError, ValueError):  # of a file that is not there: the client names it
            others = path.read_text()
            os.environ[name] = str(path) if own in others else _kept(f"{own}\n{others}".encode())


def _certificates(value: str) -> str:
    """The text that `value` is or names. Raises an error if OpenSSL does not accept it."""
    text = value if _BEGIN in value else Path(value).expanduser().read_text()
    _accepted(text)
    return text


@functools.lru_cache(maxsize=4)
def _accepted(certificates: str) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates)


def _kept(certificates: bytes) -> str:
    """The path of a file of this user with these bytes, which all processes of the user on this machine share."""
    digest = hashlib.sha256(certificates).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}-{digest}.pem"
    if not (path.is_file() and path.lstat().st_uid == os.getuid() and path.read_bytes() == certificates):
        handle, new = tempfile.mkstemp(prefix=_PREFIX, suffix=".pem", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(certificates)
        try:
            os.replace(new, path)
        except OSError:  # one of another user is there
            return new
    return str(path)
