"""A file system of a few megabytes in memory, which a training can fill without harm to others."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitline.infra.children import end_with_parent
from vitline.infra.plain_text import last_words

SIZE_BYTES = 32 << 20
PAGE_BYTES = 4096
_BALLAST = ".ballast"
_MOUNT = 'mount -t tmpfs -o size="$1" small "$0" && echo mounted && exec cat'


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Its folder, until the context ends. Skips the test where the kernel does not let this user mount one.

    It is mounted in a mount namespace of a process of its own, through which this process reaches it, so no other process
    sees it, and it is gone with that process. Neither root nor a change of the system is needed: `unshare -rm`.
    """
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare (util-linux) is missing, which mounts a file system without root")
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", _MOUNT, folder, str(SIZE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "mounted\n":
                _, said = holder.communicate()
                pytest.skip(f"the kernel refuses a small file system to this user: {last_words(said)}")
            yield Path(f"/proc/{holder.pid}/root{folder}")
        finally:
            holder.kill()
            holder.communicate()


def fill(disk: Path) -> None:
    """Takes all the room that is left."""
    with contextlib.suppress(OSError), open(disk / _BALLAST, "wb", buffering=0) as file:
        while file.write(bytes(PAGE_BYTES)) == PAGE_BYTES:
            pass


def make_room(disk: Path) -> None:
    """Gives back what `fill` has taken."""
    (disk / _BALLAST).unlink()
