"""Builds the compiled kernels where there is a compiler; their pure-Python twins serve where there is none."""

from setuptools import Distribution, Extension, setup

KERNELS = ("records/_kernel", "wire/kafka/_runs", "wire/_comet")


class DistributionWithData(Distribution):
    """Data files are installed with `pip install --editable` too: setuptools asks for them by a name of its own."""

    has_data = Distribution.has_data_files


setup(
    distclass=DistributionWithData,
    ext_modules=[
        Extension(
            f"millstream.{name.replace('/', '.')}",
            [f"src/millstream/{name}.pyx"],
            extra_compile_args=["-O3"],
            optional=True,
        )
        for name in KERNELS
    ],
    # In a wheel `purelib` is beside `data`. It goes to site-packages, the only place where Python reads .pth files.
    data_files=[("../purelib", ["src/_millstream_pyspark.pth"])],
)
