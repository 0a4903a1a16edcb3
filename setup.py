"""Builds the compiled kernel where there is a compiler; the pure-Python twin serves where there is none."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "millstream.records._kernel",
            ["src/millstream/records/_kernel.pyx"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
