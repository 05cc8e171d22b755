"""Creates `.venv` and installs this project with the files of requirements.lock, after printing download and disk sizes, and builds the
native decoder where it can. Uses only the standard library.

python3 infra/local/install.py EXTRA               as `make install` does; EXTRA is prep, train, flows, local, dev, ...
python3 infra/local/install.py --hashes=no EXTRA   by version alone, whatever files the index has
python3 infra/local/install.py --print EXTRA       only prints the lines of requirements.lock for that extra, without torch where pip's
                                                   index has a build of its own
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
NATIVE = ROOT / "vit" / "native"
LOCK = ROOT / "requirements.lock"
# Measured on Linux x86-64 with the CPU build of torch; see README, "What it takes".
DOWNLOAD, DISK = "about 0.5 GB", "2.2 GB"
NEEDED_BYTES = 3 * 10**9
OF_CUDA = ("triton", "nvidia-", "cuda-")
"""How the names of the packages begin that a torch for CUDA brings. Their versions differ from build to build of one torch."""
SAY_EVERY_S = 20.0
WAY_OUT = "`make HASHES=no ...` installs the same versions without comparing files"
_BLOCK = re.compile(r"^# for: (.+)\n((\S+)==(\S+).*\n(?: +--hash=.*\n)+)", re.MULTILINE)


class Pin(NamedTuple):
    """One package of requirements.lock."""

    name: str
    version: str
    extras: frozenset[str]
    """The extras that need it; `base` is vitline without any."""
    lines: str
    """Its lines: version, marker, and a hash for each file."""


def main() -> int:
    option, extra = ["--hashes=yes", *sys.argv[1:]][-2:] if len(sys.argv) in (2, 3) else ("", "")
    chosen, hashes = pins(extra), option != "--hashes=no"
    if not chosen or option not in ("--hashes=yes", "--hashes=no", "--print"):
        print(__doc__)
        return 2
    if option == "--print":
        pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        checked, _, note = split_by_torch(pip, chosen)
        print("".join(pin.lines for pin in checked), end="")
        if note:
            print(note, file=sys.stderr)
        return 0
    if problem := unfit(sys.version_info[:3], hashes):
        print(problem)
        return 1
    # -qq hides warnings, such as those about this machine's pip settings, but not errors.
    pip = in_venv("pip", "--disable-pip-version-check", "install", "-qq", "--no-compile")
    alone = ["--no-deps", "--no-build-isolation"] if hashes else ["--no-deps"]
    names = {pin.name for pin in chosen}
    stamp, wanted = VENV / f"installed-{extra}", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        if "torch" in names:
            build_decoder([*pip, *alone], explain=False)
        return 0
    print(
        f"Installing into .venv: downloads {DOWNLOAD}, takes {DISK} of disk, 1 to 5 minutes; nothing outside this folder."
    )
    if shutil.disk_usage(ROOT).free < NEEDED_BYTES and not VENV.exists():
        print(
            f"Only {shutil.disk_usage(ROOT).free / 1e9:.1f} GB are free at {ROOT}; free {NEEDED_BYTES / 1e9:.0f} GB first."
        )
        return 1
    if not (VENV / "bin" / "python").exists() and work("making .venv", [sys.executable, "-P", "-m", "venv", str(VENV)]):
        return 1
    if hashes:
        itself = [*pip, *alone, "--editable", str(ROOT)]
        installed = install_hashed(pip, chosen, VENV) and not work("installing vitline itself", itself)
    else:
        installed = install_versions(pip, chosen, VENV, "--editable", f"{ROOT}[{extra}]")
    if not installed:
        print("The installation failed; pip's message is above. Next: fix the cause and run the same command again.")
        return 1
    if "torch" in names:
        build_decoder([*pip, *alone], explain=True)
    compile_modules()
    # With them the first start of the local stack is faster. Only some extras have its servers.
    databases = in_venv("vitline.infra.local.databases")
    if "mlflow" in names and work("preparing the databases of MLflow and Prefect", databases):
        print(
            "The databases of MLflow and Prefect could not be prepared; the reason is above. Next: run the command again."
        )
        return 1
    stamp.write_text(wanted)
    return 0


def in_venv(*words: str) -> list[str]:
    """A command that runs a module with the Python of .venv."""
    return [str(VENV / "bin" / "python"), "-P", "-m", *words]


def unfit(python: tuple[int, ...], hashes: bool) -> str:
    """Why this machine cannot be installed on; empty if it can."""
    found = f"this is {'.'.join(map(str, python))} ({sys.executable})"
    if python < (3, 11):
        return f"vitline needs Python 3.11 or newer; {found}. Next: make PYTHON=python3.12 ..."
    if hashes and python >= (3, 14):
        return f"requirements.lock has files for Python 3.11 to 3.13; {found}. Next: make PYTHON=python3.12 ..., or: {WAY_OUT}."
    if hashes and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"requirements.lock has files for Linux x86_64; this is {sys.platform} {platform.machine()}. Next: {WAY_OUT}."
    return ""


def pins(extra: str | None = None, lock: Path = LOCK) -> list[Pin]:
    """The packages of the lock, or of those the ones that an extra needs."""
    found = (
        Pin(name, version, frozenset(extras.split()), lines)
        for extras, lines, name, version in _BLOCK.findall(lock.read_text())
    )
    return [pin for pin in found if extra is None or extra in pin.extras]


def install_hashed(pip: list[str], chosen: Iterable[Pin], folder: Path) -> bool:
    """Installs the packages, each from a file whose sha256 the lock has; whether that worked. Files for pip go into `folder`.

    A torch with a local version label, such as 2.13.0+cpu, comes from another index than the files of the lock. It and what
    belongs to it are installed by version, which is printed.
    """
    chosen = list(chosen)
    checked, named, note = split_by_torch(pip, chosen)
    if note:
        print(note)
    # A package without a wheel is built; by the setuptools of the lock, and not by what pip would fetch for it.
    for some in ([pin for pin in checked if pin.name == "setuptools"], checked):
        listed = folder / "requirements.txt"
        listed.write_text("".join(pin.lines for pin in some))
        hashed = ["--require-hashes", "--no-deps", "--no-build-isolation", "--requirement", str(listed)]
        if some and work(f"pip downloads and installs {len(some)} packages", [*pip, *hashed]):
            print(
                "If pip says above that a package does not match its hashes: the file of the index is not the one that vitline was "
                f"tested with. Where the index repackages files, and you trust it: {WAY_OUT}."
            )
            return False
    return not named or install_versions(pip, chosen, folder, *named)


def split_by_torch(pip: list[str], chosen: list[Pin]) -> tuple[list[Pin], list[str], str]:
    """The packages whose files the lock knows, what is to be installed by version instead, and a note about that.

    Where the index has a torch with a local label, the lock's files of torch would be those of CUDA.
    """
    label = label_of_torch(pip, chosen)
    if not label:
        return chosen, [], ""
    unchecked = [pin for pin in chosen if pin.name.startswith(("torch", *OF_CUDA))]
    named = [f"{pin.name}=={pin.version}" for pin in unchecked if not pin.name.startswith(OF_CUDA)]
    note = (
        f"Note: this pip index has a build of its own of torch, {label}, which requirements.lock cannot know. It is to be installed by "
        f"version (pip install {' '.join(named)}); the files of all other packages are compared with their sha256."
    )
    return [pin for pin in chosen if pin not in unchecked], named, note


def install_versions(pip: list[str], chosen: Iterable[Pin], folder: Path, *wanted: str) -> bool:
    """Installs what is wanted and all that it needs, at the versions of the lock but from any files; whether that worked."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{p.name}=={p.version}\n" for p in chosen if not p.name.startswith(OF_CUDA)))
    return not work(f"pip downloads and installs {wanted[-1]}", [*pip, "--constraint", str(constraints), *wanted])


def build_decoder(pip: list[str], *, explain: bool) -> None:
    """Builds and installs vit/native, unless that is done. Says in one line why not where it fails, and if asked to `explain` also where
    the compiler or headers are missing: those can be installed later, so each call looks for them."""
    stamp, log = VENV / "native-decoder", VENV / "native-decoder.log"
    wanted = digest(*sorted(path for path in NATIVE.iterdir() if path.suffix in (".c", ".py", ".toml")))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    missing = subprocess.run(
        [str(VENV / "bin" / "python"), "-P", str(NATIVE / "needs.py")], capture_output=True, text=True
    )
    if missing.returncode:
        if explain:
            print(missing.stdout.strip() + " `make install` builds it once they are there.")
        return
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        source = shutil.copytree(NATIVE, Path(folder) / "native")
        failed = work("building the native decoder", [*pip, "--force-reinstall", str(source)], file)
    if failed:
        print(
            f"The native decoder could not be built, so trainings decode whole images, with the same results. Log: {log}"
        )
    else:
        stamp.write_text(wanted)


def compile_modules() -> None:
    """Compiles the installed modules on all processors. pip would take one, for nearly half of the installation. Some packages hold
    templates of modules that do not compile: they are left out."""
    work("compiling the modules", in_venv("compileall", "-qq", "-j0", str(VENV / "lib")))


def work(what: str, command: list[str], log: IO[str] | None = None) -> int:
    """Runs a command in the folder of the project and returns its exit code; its output goes into `log` if given. Says what it does every
    SAY_EVERY_S, because pip says nothing for minutes."""
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        while True:
            try:
                return process.wait(SAY_EVERY_S)
            except subprocess.TimeoutExpired:
                minutes, seconds = divmod(round(time.monotonic() - began), 60)
                print(f"  {what}, {minutes}:{seconds:02d} so far", flush=True)


def fingerprint() -> str:
    return digest(ROOT / "pyproject.toml", LOCK, ROOT / "infra" / "local" / "databases.py")


def digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def label_of_torch(pip: list[str], chosen: Iterable[Pin]) -> str:
    """The version of torch that this index has, if it has a local label; else empty. Prints a note on CUDA without a GPU."""
    torch = next((pin for pin in chosen if pin.name == "torch"), None)
    if torch is None:
        return ""
    ask = ["--dry-run", "--no-deps", "--ignore-installed", "--report", "-", f"torch=={torch.version}"]
    plan = subprocess.run([*pip, *ask], capture_output=True, text=True)
    if plan.returncode:
        return ""  # the installation will show the error
    version = json.loads(plan.stdout[plan.stdout.index("{") :])["install"][0]["metadata"]["version"]
    label = version.partition("+")[2]
    cuda = label.startswith("cu") or (not label and sys.platform == "linux")
    if cuda and not shutil.which("nvidia-smi") and not os.path.exists("/dev/nvidia0"):
        print(
            "Note: torch from this pip index is built for CUDA (about 3 GB to download, 7 GB on disk), but "
            "this machine has no NVIDIA GPU. It works anyway; set PyTorch's CPU index in pip's settings to save the space.",
            file=sys.stderr,
        )
    return version if label else ""


if __name__ == "__main__":
    sys.exit(main())
