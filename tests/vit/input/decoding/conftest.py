"""The extension, built for the tests; they are skipped where it cannot be built."""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[4] / "vit" / "native" / "vitline_native.c"


def build(folder: Path, *flags: str) -> Path:
    """The extension as `vit/native/setup.py` builds it, with further flags. Skips the test where that is impossible."""
    if (compiler := shutil.which(os.environ.get("CC", "cc"))) is None:
        pytest.skip("no C compiler")
    module = folder / "vitline_native.abi3.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O3",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    command += [*flags, f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(module), "-ljpeg", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No such file or directory" in done.stderr or "cannot find -ljpeg" in done.stderr:
        pytest.skip("no headers of Python or of libjpeg-turbo")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return module


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("vitline_native", build(tmp_path_factory.mktemp("native")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
