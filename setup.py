"""Builds the native copy kernel. Everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvbaton.copy._kernel",
            sources=sorted(glob("src/kvbaton/copy/*.c")),
            depends=sorted(glob("src/kvbaton/copy/*.h")),
            # Casts give the same bits everywhere: no product and sum in one rounding. Nobody asks for floating-point
            # traps, and without them the loops of casts become vector instructions.
            extra_compile_args=[
                "-O3",
                "-std=c11",
                "-ffp-contract=off",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            # Without a compiler the numpy fallback serves; it says that it is slow.
            optional=True,
        )
    ]
)
