"""Keys and certificates with which the parts of one service know each other (mutual TLS)."""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import AddressFamily

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from psutil import net_if_addrs

from vitline.infra.local.paths import write_private

_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
_VALID = timedelta(days=36_500)  # they are made anew at each start


AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"


def make_certificates(folder: Path, *, more_machines: bool = False) -> tuple[Path, Path, Path]:
    """Writes an authority's certificate, a certificate of this machine that it signed, and its key, as PEM files of mode 0600.

    The key of the authority is not kept, so no other certificate can be signed; unless there are `more_machines`: then
    `AUTHORITY_KEY` is in the folder, too. On each of the others, whose folder already has the two files of the authority, this signs
    their own certificate.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = folder / AUTHORITY_KEY
    if more_machines and kept.exists():
        authority, key = read_authority(folder / AUTHORITY, kept)
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = _certificate(_AUTHORITY, _AUTHORITY, key.public_key(), x509.BasicConstraints(True, 0)).sign(
            key, hashes.SHA256()
        )
        if more_machines:
            write_private(kept, _pem(key))
    own = [each.address for found in net_if_addrs().values() for each in found if each.family is AddressFamily.AF_INET]
    return write_certificate(folder, authority, key, ["127.0.0.1", *own, "localhost"])


def write_certificate(
    folder: Path, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, names: Iterable[str]
) -> tuple[Path, Path, Path]:
    """Writes `authority`, a certificate for these addresses and host names that it signs, and its key, as PEM files of mode 0600."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    part = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "part")])
    signed = (
        _certificate(part, authority.subject, key.public_key(), x509.BasicConstraints(False, None))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in dict.fromkeys(names)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return (
        write_private(folder / AUTHORITY, authority.public_bytes(Encoding.PEM).decode()),
        write_private(folder / "part.pem", signed.public_bytes(Encoding.PEM).decode()),
        write_private(folder / "part.key", _pem(key)),
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def read_authority(certificate: Path, key: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """An authority from its PEM files. Raises ValueError for a key of another kind than elliptic curves."""
    loaded = load_pem_private_key(key.read_bytes(), password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ValueError(
            f"{key} is {type(loaded).__name__}, but an elliptic-curve key is needed. Make the authority anew, as with `openssl req "
            "-newkey ec`."
        )
    return x509.load_pem_x509_certificate(certificate.read_bytes()), loaded


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, kind: x509.BasicConstraints
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))  # the clock may be set back
        .not_valid_after(now + _VALID)
        .add_extension(kind, critical=True)
    )


def _name(text: str) -> x509.GeneralName:
    """An address or a host name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
