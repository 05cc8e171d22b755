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
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import pytest

from vitline.infra.local.install import label_of_torch, pins

ROOT = Path(__file__).parents[2]
USER = 12345
PROGRAMS = ("buildah", "debootstrap", "unshare", "setpriv", "ip")
# Debian's Python is no part of its smallest system, as it is of the image that the Containerfile names.
_BASE_PACKAGES = "ca-certificates,python3,python3-venv"
_BUILD_PACKAGES = "gcc python3-dev libjpeg62-turbo-dev"
# In a mount namespace of its own: a read-only root, the names that this machine knows, /dev/shm and the given folders to write to (where
# nothing can be executed), a user without a name, no capability and no way to get one.
ENTER = """
set -e
root=$1 user=$2 folders=$3; shift 3
mount --bind "$root" "$root"
touch "$root/etc/hosts"
for each in $folders; do mkdir -p "$root${each#*=}"; done
mount -o remount,bind,ro "$root"
mount --bind /etc/hosts "$root/etc/hosts"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,noexec,nosuid,nodev shm "$root/dev/shm"
for each in $folders; do
  mkdir -p "$root${each#*=}"
  mount --bind "${each%%=*}" "$root${each#*=}"
  mount -o remount,bind,noexec,nosuid,nodev "$root${each#*=}"
done
exec setpriv --no-new-privs chroot --userspec="$user:$user" --groups="$user" "$root" "$@"
"""
# It sees only its own processes and network, too.
ALONE = (
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--net",
    "--uts",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "sh",
)


def why_not_here() -> str:
    """Why images cannot be built here; empty if they can."""
    if (sys.platform, platform.machine(), os.getuid()) != ("linux", "x86_64", 0):
        return "images are built by root on Linux x86-64"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} missing; Debian: apt-get install buildah debootstrap iproute2" if missing else ""


class Images:
    """A storage of images in `folder`; nothing outside of it changes, and its deletion deletes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._built = folder, set[str]()
        self._roots, self._configs = dict[str, str](), dict[str, dict]()
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, target: str) -> None:
        """Builds a target, once; also the stages that targets share are built once."""
        if target in self._built:
            return
        if target != "prep" and not label_of_torch([sys.executable, "-m", "pip", "install", "-qq"], pins("train")):
            pytest.skip("pip's index has no torch for CPUs of its own: the image would take some GB for CUDA")
        arguments = {"BASE": self._base, "BUILD_PACKAGES": _BUILD_PACKAGES, "REVISION": "tested"}
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--volume={mount}" for mount in self._mounts]
        file = ["--file", str(ROOT / "infra" / "images" / "Containerfile")]
        self._buildah("bud", "--layers", *options, *file, "--target", target, "--tag", target, str(ROOT))
        self._built.add(target)

    def config(self, target: str) -> dict:
        """What the image says about itself: Env, User, Cmd, Labels."""
        return json.loads(self._buildah("inspect", "--type", "image", target))["OCIv1"]["config"]

    def gigabytes(self, target: str) -> float:
        """The size of the image, unpacked."""
        (image,) = json.loads(self._buildah("images", "--json", f"localhost/{target}"))
        number, unit = image["size"].split()
        return float(number) * {"MB": 1e-3, "GB": 1}[unit]

    def enter(self, target: str, script: str, tmp: Path) -> subprocess.CompletedProcess[str]:
        """Runs a shell script as the only process of the image, in its environment but as another user, with the folder `tmp` as /tmp."""
        tmp.mkdir(exist_ok=True)
        tmp.chmod(0o1777)
        command = [*ALONE, *self.entered(target, ["sh", "-ec", script], {"/tmp": tmp})]
        return subprocess.run(command, capture_output=True, text=True)

    def entered(
        self,
        target: str,
        command: Sequence[str],
        folders: Mapping[str, Path],
        variables: Mapping[str, str] = MappingProxyType({}),
        user: int = USER,
        working: str | None = None,
    ) -> list[str]:
        """The command that runs `command` as a process of the image, on the network of this machine; `folders` by their place in it,
        `working` the one where it starts, by default that of the image."""
        if target not in self._roots:
            self._roots[target] = self._buildah("mount", self._buildah("from", target))
            self._configs[target] = self.config(target)
        config = self._configs[target]
        mounts = " ".join(f"{folder}={place}" for place, folder in folders.items())
        enter = ["unshare", "--mount", "--ipc", "sh", "-c", ENTER, "enter", self._roots[target], str(user), mounts]
        given = [f"{name}={value}" for name, value in variables.items()]
        return [*enter, "env", f"--chdir={working or config['WorkingDir']}", "-i", *config["Env"], *given, *command]

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
