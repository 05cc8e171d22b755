"""What the build of the extension needs. As a program: exits with 1, and says so in one line, where that is missing."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig

NEEDED = (
    "vitline-native, which makes 2.55 times as many training views per second of CPU time as Pillow (vitline without it 1.97 times; "
    "tests/benchmarks/README.md), needs a C compiler and the headers of Python and of libjpeg-turbo 2.0 or newer (Debian: gcc python3-dev "
    "libjpeg62-turbo-dev; Ubuntu: gcc python3-dev libjpeg-turbo8-dev; Fedora: gcc python3-devel libjpeg-turbo-devel; macOS: brew "
    "install jpeg-turbo). vitline gives the same results without it."
)
HEADERS = b"#include <stdio.h>\n#include <Python.h>\n#include <jpeglib.h>\n"


def can_build() -> bool:
    """Whether the compiler that setuptools uses is there and finds the headers."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return False
    flags = [flag for name in ("CFLAGS", "CPPFLAGS") for flag in shlex.split(os.environ.get(name, ""))]
    preprocess = [*compiler, *flags, f"-I{sysconfig.get_path('include')}", "-E", "-x", "c", "-"]
    return subprocess.run(preprocess, input=HEADERS, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    if not can_build():
        print(NEEDED)
        sys.exit(1)
