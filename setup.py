"""Builds the compiled kernels where there is a compiler; their pure-Python twins serve where there is none."""

from setuptools import Extension, setup

KERNELS = ("records/_kernel", "wire/kafka/_runs")

setup(
    ext_modules=[
        Extension(
            f"millstream.{name.replace('/', '.')}",
            [f"src/millstream/{name}.pyx"],
            extra_compile_args=["-O3"],
            optional=True,
        )
        for name in KERNELS
    ]
)
