"""Keys and certificates with which the parts of one service know each other on this machine (mutual TLS)."""

import ipaddress
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

_VALID = timedelta(days=36_500)  # they are made anew at each start


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Writes an authority's certificate, a certificate that it signed, and its key, as PEM files of mode 0600.

    The key of the authority is not kept, so no other certificate can be signed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = [each.address for found in net_if_addrs().values() for each in found if each.family is AddressFamily.AF_INET]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys(["127.0.0.1", *own])]
    here = x509.SubjectAlternativeName([*addresses, x509.DNSName("localhost")])
    signer = _certificate("authority", authority.public_key(), x509.BasicConstraints(True, 0)).sign(
        authority, hashes.SHA256()
    )
    signed = (
        _certificate("part", key.public_key(), x509.BasicConstraints(False, None))
        .add_extension(here, critical=False)
        .sign(authority, hashes.SHA256())
    )
    return (
        write_private(folder / "authority.pem", signer.public_bytes(Encoding.PEM).decode()),
        write_private(folder / "part.pem", signed.public_bytes(Encoding.PEM).decode()),
        write_private(
            folder / "part.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        ),
    )


def _certificate(name: str, key: ec.EllipticCurvePublicKey, kind: x509.BasicConstraints) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))  # the clock may be set back
        .not_valid_after(now + _VALID)
        .add_extension(kind, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
