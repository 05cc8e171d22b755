"""Builds the extension. Says in one sentence what is missing where that fails."""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

NEEDED = (
    "vitline-native could not be built; the compiler's message is above. It needs a C compiler and the headers of Python and of "
    "libjpeg-turbo 2.0 or newer (Debian: gcc python3-dev libjpeg62-turbo-dev; Ubuntu: gcc python3-dev libjpeg-turbo8-dev; Fedora: "
    "gcc python3-devel libjpeg-turbo-devel; macOS: brew install jpeg-turbo). vitline works without it, more slowly."
)


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError) as error:
            print(NEEDED, file=sys.stderr)
            raise SystemExit(1) from error


setup(
    py_modules=[],
    ext_modules=[
        Extension(
            "vitline_native",
            ["vitline_native.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            libraries=["jpeg"],
            # A fused multiplication and addition would round weights in another way than torch.
            extra_compile_args=["-O3", "-ffp-contract=off"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": Build},
)
