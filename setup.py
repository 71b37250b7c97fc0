"""Builds the native copy kernel. Everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvbaton.copy._kernel",
            sources=["src/kvbaton/copy/_kernel.c"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            # Without a compiler the numpy fallback serves; it says that it is slow.
            optional=True,
        )
    ]
)
