"""Azurite, Microsoft's emulator of Azure Blob Storage, which npm installs: `npm install -g azurite`."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from vitline.infra.local.processes import free_ports

ACCOUNT = "devstoreaccount1"
KEY = base64.b64encode(b"of an emulator on loopback, for the time of a test; 64 bytes long").decode()


@contextlib.contextmanager
def running_azurite(folder):
    """Starts Azurite with the container `box`, and yields the variables with which a process reaches it."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed: npm install -g azurite")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--disableTelemetry"]
    with (folder / "azurite.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--silent", "--skipApiVersionCheck", *options],
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=log,
            stderr=log,
        )
    try:
        create_container(url, "box")
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": url,
        }
    finally:
        process.terminate()
        process.wait()


def create_container(url, name):
    """Creates a container by a signed request, which is repeated until the server answers."""
    ends = time.monotonic() + 240
    while True:
        date = email.utils.formatdate(usegmt=True)
        signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        }
        try:
            request = urllib.request.Request(f"{url}/{name}?restype=container", method="PUT", headers=headers)
            urllib.request.urlopen(request, timeout=120).close()
            return
        except urllib.error.URLError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)
