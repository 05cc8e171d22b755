"""Certificates of an authority of one's own, for the clients of stores, Prefect, MLflow and Ray's job server.

Each of them reads one of VARIABLES in place of the public authorities. VITLINE_CA is for all of them, and beside the public ones.
"""

import functools
import hashlib
import os
import ssl
import tempfile
from pathlib import Path

VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
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
    """The certificates that a client gets which reads none of VARIABLES: those of the file in SSL_CERT_FILE, as PEM text."""
    path = os.environ.get("SSL_CERT_FILE")
    return Path(path).read_bytes() if path else None


def named_files() -> dict[str, str]:
    """The files with certificates that variables of this process name."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def certificate_advice() -> str:
    """For errors: the next step where a client does not accept the certificate of a server."""
    theirs = [name for name, path in named_files().items() if not _is_ours(path)]
    first = (
        f" {' and '.join(theirs)}, which {'count' if len(theirs) > 1 else 'counts'} before it, must then be unset."
        if theirs
        else ""
    )
    return f"Set VITLINE_CA to a file with the certificates of your authority.{first}"


def trust_own_authority() -> None:
    """Sets those of VARIABLES that are not set, for this process and its children, to a file with the public authorities and
    those of VITLINE_CA. Nothing is set where that cannot be read: `Settings` refuses it."""
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

    path = _kept(f"{own}\n{Path(certifi.where()).read_text()}".encode())
    for name in VARIABLES:
        if not os.environ.get(name) or _is_ours(os.environ[name]):
            os.environ[name] = path


def _certificates(value: str) -> str:
    """The text that `value` is or names. Raises an error if OpenSSL does not accept it."""
    text = value if _BEGIN in value else Path(value).expanduser().read_text()
    _accepted(text)
    return text


@functools.lru_cache(maxsize=4)
def _accepted(certificates: str) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates)


def _is_ours(path: str) -> bool:
    return Path(path).name.startswith(_PREFIX)


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
