"""Builds what is written in C. Where that fails (no compiler), the package installs all the same, and
`holdfast doctor` says what is lost.
"""

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PID1 = Extension("holdfast.sandbox.pid1", ["src/holdfast/sandbox/pid1.c"], optional=True)
# The stable ABI: guests may run another Python than the one that installed this.
SNAPSHOT = Extension(
    "holdfast._snapshot",
    ["src/holdfast/_snapshot.c", "src/holdfast/_image.c"],
    depends=["src/holdfast/_snapshot.h"],
    optional=True,
    py_limited_api=True,
)


class BuildNative(build_ext):
    """Knows one thing more than its parent: pid 1 is no module but a small static executable."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) if fullname.endswith("pid1") else super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext is not PID1:
            super().build_extension(ext)
            return
        target = self.get_ext_fullpath(ext.name)
        objects = self.compiler.compile(ext.sources, output_dir=self.build_temp, extra_preargs=["-Os"])
        self.compiler.link_executable(
            objects, os.path.basename(target), output_dir=os.path.dirname(target), extra_preargs=["-static", "-s"]
        )


setup(ext_modules=[PID1, SNAPSHOT], cmdclass={"build_ext": BuildNative})
