"""Keys and certificates with which the parts of one service know each other (mutual TLS)."""

import ipaddress
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

_VALID = timedelta(days=36_500)  # they are made anew at each start


AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"


def make_certificates(folder: Path, *, more_machines: bool = False) -> tuple[Path, Path, Path]:
    """Writes an authority's certificate, a certificate for this machine that it signed, and its key, as PEM files of mode 0600.

    The key of the authority is not kept, so no other certificate can be signed; unless there are `more_machines`: then
    `AUTHORITY_KEY` is in the folder, too. On each of the others, whose folder already has the two files of the authority, this signs
    their own certificate.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, kept = ec.generate_private_key(ec.SECP256R1()), folder / AUTHORITY_KEY
    if more_machines and kept.exists():
        return folder / AUTHORITY, *_signed(folder, _loaded(kept), key)
    authority = ec.generate_private_key(ec.SECP256R1())
    if more_machines:
        write_private(kept, _pem(authority))
    signer = _certificate("authority", authority.public_key(), x509.BasicConstraints(True, 0)).sign(
        authority, hashes.SHA256()
    )
    written = write_private(folder / AUTHORITY, signer.public_bytes(Encoding.PEM).decode())
    return written, *_signed(folder, authority, key)


def _signed(folder: Path, authority: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
    """The files of a certificate for the addresses of this machine, and of its key."""
    own = [each.address for found in net_if_addrs().values() for each in found if each.family is AddressFamily.AF_INET]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys(["127.0.0.1", *own])]
    here = x509.SubjectAlternativeName([*addresses, x509.DNSName("localhost")])
    signed = (
        _certificate("part", key.public_key(), x509.BasicConstraints(False, None))
        .add_extension(here, critical=False)
        .sign(authority, hashes.SHA256())
    )
    return (
        write_private(folder / "part.pem", signed.public_bytes(Encoding.PEM).decode()),
        write_private(folder / "part.key", _pem(key)),
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _loaded(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


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
