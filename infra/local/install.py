"""Creates `.venv` and installs this project under its constraints; says first what that takes. Standard library only.

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
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    tell_about_cuda(pip, constraints)
    # Warnings about index settings of this machine's pip are not ours to show; errors are.
    done = subprocess.run([*pip, *constraints, "--editable", f"{ROOT}[{extra}]"], check=False)
    if done.returncode:
        print("The installation failed; pip's message is above. Next: mend it and run the same command again.")
        return 1
    if not prepare_databases():
        return 1
    stamp.write_text(wanted)
    return 0


def prepare_databases() -> bool:
    """Tables of the servers' databases, made here once: the first start of the local stack would wait for them."""
    made = subprocess.run([str(VENV / "bin" / "python"), "-m", "infra.local.first_start"], cwd=ROOT, check=False)
    if made.returncode:
        print("The databases of MLflow and Prefect could not be prepared; the reason is above. Next: the same again.")
    return made.returncode == 0


def fingerprint() -> str:
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "infra" / "local" / "first_start.py")
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def tell_about_cuda(pip: list[str], constraints: list[str]) -> None:
    """Says so when the torch that pip will take brings CUDA packages to a machine without a GPU."""
    if shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0"):
        return
    plan = subprocess.run([*pip, *constraints, "--dry-run", "--report", "-", "torch"], capture_output=True, text=True)
    if plan.returncode:
        return  # the installation itself will say what is wrong
    names = [item["metadata"]["name"] for item in json.loads(plan.stdout[plan.stdout.index("{") :])["install"]]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    if cuda:
        print(
            f"Note: pip's torch brings {len(cuda)} CUDA packages (about 3 GB to download, 7 GB on disk) and this machine "
            "shows no NVIDIA GPU. It works all the same; a CPU index of PyTorch in pip's settings would save the space."
        )


if __name__ == "__main__":
    sys.exit(main())
