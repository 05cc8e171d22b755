"""Images of infra/images, really built and entered, without a daemon or a registry: Buildah builds, on a base that debootstrap makes.

What a container runtime promises a process is done here by the kernel's own means (`ENTER`), because Buildah's way into an image,
`buildah run --isolation chroot`, neither makes the root read-only nor hides the other processes.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

from vitline.infra.local.install import label_of_torch, pins

ROOT = Path(__file__).parents[2]
USER = 12345
PROGRAMS = ("buildah", "debootstrap", "unshare", "setpriv", "ip")
# Debian's Python is no part of its smallest system, as it is of the image that the Containerfile names.
_BASE_PACKAGES = "ca-certificates,python3,python3-venv"
_BUILD_PACKAGES = "gcc python3-dev libjpeg62-turbo-dev"
# In namespaces of its own: a read-only root, /tmp and /dev/shm to write to (where nothing can be executed), only its own processes and
# network, a user without a name, no capability and no way to get one.
ENTER = """
set -e
root=$1 tmp=$2 user=$3; shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,noexec,nosuid,nodev shm "$root/dev/shm"
mount --bind "$tmp" "$root/tmp"
mount -o remount,bind,noexec,nosuid,nodev "$root/tmp"
ip link set lo up
exec setpriv --no-new-privs chroot --userspec="$user:$user" --groups="$user" "$root" "$@"
"""


def require_programs() -> None:
    """Skips where images cannot be built."""
    if (sys.platform, platform.machine(), os.getuid()) != ("linux", "x86_64", 0):
        pytest.skip("images are built by root on Linux x86-64")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} missing; Debian: apt-get install buildah debootstrap iproute2")


class Images:
    """A storage of images in `folder`; nothing outside of it changes, and its deletion deletes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._roots = folder, dict[str, str]()
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, target: str) -> None:
        """Builds a target; the stages that targets share are built once."""
        if target != "prep" and not label_of_torch([sys.executable, "-m", "pip", "install", "-qq"], pins("train")):
            pytest.skip("pip's index has no torch for CPUs of its own: the image would take some GB for CUDA")
        arguments = {"BASE": self._base, "BUILD_PACKAGES": _BUILD_PACKAGES, "REVISION": "tested"}
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--volume={mount}" for mount in self._mounts]
        file = ["--file", str(ROOT / "infra" / "images" / "Containerfile")]
        self._buildah("bud", "--layers", *options, *file, "--target", target, "--tag", target, str(ROOT))

    def config(self, target: str) -> dict:
        """What the image says about itself: Env, User, Cmd, Labels."""
        return json.loads(self._buildah("inspect", "--type", "image", target))["OCIv1"]["config"]

    def enter(self, target: str, script: str, tmp: Path) -> subprocess.CompletedProcess[str]:
        """Runs a shell script as a process of the image, in its environment but as another user, with the folder `tmp` as /tmp."""
        if target not in self._roots:
            self._roots[target] = self._buildah("mount", self._buildah("from", target))
        tmp.mkdir(exist_ok=True)
        tmp.chmod(0o1777)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"]
        entered = [*namespaces, "sh", "-c", ENTER, "enter", self._roots[target], str(tmp), str(USER)]
        command = [*entered, "env", "-i", *self.config(target)["Env"], "sh", "-ec", script]
        return subprocess.run(command, capture_output=True, text=True)

    def delete(self) -> None:
        """Removes all images, and the folder."""
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")
        shutil.rmtree(self._folder)

    @cached_property
    def _base(self) -> str:
        system = self._folder / "base"
        _run(["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", "bookworm", str(system)])
        for package in (system / "var" / "cache" / "apt" / "archives").glob("*.deb"):
            package.unlink()
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(system), "/")
        self._buildah("commit", "--quiet", "--rm", container, "localhost/base")
        shutil.rmtree(system)
        return "localhost/base"

    @cached_property
    def _mounts(self) -> list[str]:
        """pip's settings of this machine as one file, and the files and folders that they name."""
        listed = _run([sys.executable, "-m", "pip", "config", "list"])
        found = re.findall(r"^:?(\w+):?\.([\w-]+)='(.*)'$", listed, re.M)
        found.sort(key=lambda setting: setting[0] == "env")  # variables win
        settings = {key: value for _, key, value in found}
        file = self._folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        words = [word for value in settings.values() for word in value.split()]
        # The pages of an index in a folder lead to files beside it.
        named = {str(Path(word[7:]).parent) if word.startswith("file://") else word for word in words}
        return [f"{file}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in named if path.startswith("/"))]

    def _buildah(self, *words: str) -> str:
        storage = ["--root", str(self._folder / "storage"), "--runroot", str(self._folder / "run")]
        command = ["buildah", *storage, *words]
        return _run(command, BUILDAH_ISOLATION="chroot").strip()


def _run(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
