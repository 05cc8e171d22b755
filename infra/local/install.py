"""Creates `.venv` and installs this project with its constraints, after printing download and disk sizes. Uses only the
standard library.

python3 infra/local/install.py local|dev
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
# Measured on Linux x86-64 with the CPU build of torch; see README, "What it takes".
DOWNLOAD, DISK = "about 0.5 GB", "2.2 GB"
NEEDED_BYTES = 3 * 10**9


def main() -> int:
    extra = sys.argv[1] if len(sys.argv) == 2 else ""
    if extra not in ("local", "dev"):
        print(__doc__)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 a machine has
        found = ".".join(map(str, sys.version_info[:3]))
        print(
            f"vitline needs Python 3.11 or newer; this is {found} ({sys.executable}). Next: make PYTHON=python3.12 ..."
        )
        return 1
    stamp, wanted = VENV / f"installed-{extra}", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    print(
        f"Installing into .venv: downloads {DOWNLOAD}, takes {DISK} of disk, 1 to 5 minutes; nothing outside this folder."
    )
    if shutil.disk_usage(ROOT).free < NEEDED_BYTES and not VENV.exists():
        print(
            f"Only {shutil.disk_usage(ROOT).free / 1e9:.1f} GB are free at {ROOT}; free {NEEDED_BYTES / 1e9:.0f} GB first."
        )
        return 1
    if not (VENV / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    note_cuda_packages(pip, constraints)
    # -qq hides warnings, such as those about this machine's pip settings, but not errors.
    done = subprocess.run([*pip, *constraints, "--editable", f"{ROOT}[{extra}]"], check=False)
    if done.returncode:
        print("The installation failed; pip's message is above. Next: fix the cause and run the same command again.")
        return 1
    if not prepare_databases():
        return 1
    stamp.write_text(wanted)
    return 0


def prepare_databases() -> bool:
    """Prepares the databases of MLflow and Prefect, so that the first start of the local stack is faster."""
    made = subprocess.run([str(VENV / "bin" / "python"), "-m", "infra.local.databases"], cwd=ROOT, check=False)
    if made.returncode:
        print(
            "The databases of MLflow and Prefect could not be prepared; the reason is above. Next: run the command again."
        )
    return made.returncode == 0


def fingerprint() -> str:
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "infra" / "local" / "databases.py")
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def note_cuda_packages(pip: list[str], constraints: list[str]) -> None:
    """Prints a note if pip will install CUDA packages with torch on a machine without a GPU."""
    if shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0"):
        return
    plan = subprocess.run([*pip, *constraints, "--dry-run", "--report", "-", "torch"], capture_output=True, text=True)
    if plan.returncode:
        return  # the installation will show the error
    names = [item["metadata"]["name"] for item in json.loads(plan.stdout[plan.stdout.index("{") :])["install"]]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    if cuda:
        print(
            f"Note: torch from this pip index needs {len(cuda)} CUDA packages (about 3 GB to download, 7 GB on disk), but "
            "this machine has no NVIDIA GPU. It works anyway; set PyTorch's CPU index in pip's settings to save the space."
        )


if __name__ == "__main__":
    sys.exit(main())
