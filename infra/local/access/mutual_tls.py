"""Keys and certificates with which the parts of one service know each other on this machine (mutual TLS)."""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import AddressFamily

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from psutil import net_if_addrs

from vitline.infra.local.paths import write_private

_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
_VALID = timedelta(days=36_500)  # they are made anew at each start


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Writes the certificate of a new authority, a certificate of this machine that it signed, and its key, as PEM files of mode 0600.

    The key of the authority is not kept, so no other certificate can be signed.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(_AUTHORITY, _AUTHORITY, key.public_key(), x509.BasicConstraints(True, 0)).sign(
        key, hashes.SHA256()
    )
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
        write_private(folder / "authority.pem", authority.public_bytes(Encoding.PEM).decode()),
        write_private(folder / "part.pem", signed.public_bytes(Encoding.PEM).decode()),
        write_private(
            folder / "part.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        ),
    )


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
