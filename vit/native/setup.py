"""Builds the extension. Says in one sentence what is missing where that is why it fails."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

sys.path.insert(0, str(Path(__file__).parent))
from needs import NEEDED, can_build


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError) as error:
            if can_build():
                raise
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
