"""Writes requirements.lock: the version of each package that vitline or an extra needs with any supported Python, and the sha256 of
its files. Versions stay as they are where they fit pyproject.toml.

python -m docs.generate.lock [--upgrade | --upgrade-package NAME ...]

uv resolves and reads the hashes, from PyPI or the index of UV_DEFAULT_INDEX; pip's settings are not used.
"""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitline.infra.local.install import LOCK, ROOT, pins

HEAD = """\
# Written by `make lock`. Every install of this project uses this file: its versions, and only files with one of these sha256.
# Linux x86-64, Python 3.11 to 3.13. `for` names the extras of pyproject.toml that need a package; base is vitline without any.
"""
# musl, PyPy, and Pythons beyond those of the lock
_FOREIGN = re.compile(r"-musllinux|-pp\d|-cp3(?!1[123]-)\d+t?-(?!abi3)|-cp\d+t-")
_ALWAYS = re.compile(
    r"^python_full_version (>= '3.(\d|10|11)'|< '3.14')$|^(sys_platform|platform_machine|\w*implementation\w*) "
)


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with TemporaryDirectory() as folder:
        build, versions = Path(folder, "build.in"), Path(folder, "versions.txt")
        build.write_text("".join(f"{line}\n" for line in project["build-system"]["requires"]))
        if LOCK.exists():  # uv keeps the versions of the file that it will overwrite
            versions.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins()))
        extras = project["project"]["optional-dependencies"]
        resolve(build, versions, *(f"--extra={extra}" for extra in extras), *sys.argv[1:])
        locked = {}
        for extra in ("base", *extras):
            path = Path(folder, f"pylock.{extra}.toml")
            chosen = () if extra == "base" else (f"--extra={extra}",)
            resolve(build, path, *chosen, f"--constraint={versions}", "--format=pylock.toml")
            locked[extra] = tomllib.loads(path.read_text())["packages"]
    LOCK.write_text(HEAD + "".join(blocks(locked)))
    return 0


def resolve(build: Path, out: Path, *options: str) -> None:
    """Lets uv write what pyproject.toml needs, for the environments under `tool.uv`; raises SystemExit with its message above."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--universal", "--no-header"]
    command += ["--python", sys.executable, "--output-file", str(out), *options, "pyproject.toml", str(build)]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(
            "requirements.lock is as it was: uv found no versions that fit, or an option is wrong; its message is above."
        )


def blocks(locked: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The blocks of the lock, from the packages of each extra as pylock.toml has them.

    Raises SystemExit for a package of which two Pythons need two versions.
    """
    packages: dict[str, dict[str, Any]] = {}
    extras = defaultdict(list)
    for extra, found in locked.items():
        for package in found:
            name = package["name"]
            other = packages.setdefault(name, package)["version"]
            if other != package["version"]:
                raise SystemExit(
                    f"{name} needs two versions, {other} and {package['version']}; bound it in pyproject.toml."
                )
            extras[name].append(extra)
            packages[name] = package  # the markers of the last extra, dev, hold for all
    return [block(package, extras[name]) for name, package in sorted(packages.items())]


def block(package: dict[str, Any], extras: list[str]) -> str:
    """The lines of one package: its wheels, or its source where it has none."""
    wheels = [
        wheel
        for wheel in package.get("wheels", ())
        if not _FOREIGN.search(wheel.get("name") or wheel["url"].rpartition("/")[2])
    ]
    hashes = sorted({f"sha256:{file['hashes']['sha256']}" for file in wheels or [package["sdist"]]})
    # What holds for every supported environment is left out.
    marker = " and ".join(
        part for part in package.get("marker", "").split(" and ") if part and not _ALWAYS.search(part)
    )
    marker = f" ; {marker}" if marker else ""
    lines = [f"{package['name']}=={package['version']}{marker}", *(f"    --hash={each}" for each in hashes)]
    return f"# for: {' '.join(extras)}\n" + " \\\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
