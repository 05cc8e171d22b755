"""SeaweedFS as the S3 service of the local stack: its command, and the check that it works."""

import secrets
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from vitline.infra.local.paths import write_private
from vitline.infra.local.stack_config import BUCKET, GRPC_PORT_OFFSET, S3_INTERNAL, StackConfig, seaweed_program

_TEMPORARY = Path("/tmp")  # compiled in
_KEY = f"{BUCKET}/.stack/sentinel"


def command(config: StackConfig) -> list[str]:
    """The command: all ports on loopback, no telemetry, and bucket rules as on AWS."""
    ports = {name.removeprefix("s3."): config.ports[name] for name in S3_INTERNAL}
    return [
        str(seaweed_program()),
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
    from vitline.infra.local.access.mutual_tls import (
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
    """Removes the sockets that the store of a stack leaves."""
    remove_sockets_of(port for name, port in config.ports.items() if name.startswith("s3"))


def remove_sockets_of(ports: Iterable[int]) -> None:
    """Removes the sockets that SeaweedFS leaves in the temporary folder, which are named after its ports and second ports."""
    for port in ports:
        for number in (port, port + GRPC_PORT_OFFSET):
            for path in _TEMPORARY.glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)


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
