#!/bin/sh
# The Python of a local Spark's processes, without the zipped pyspark on its path: see interpreter.py.
PYTHONPATH=${PYTHONPATH#*/pyspark.zip:}
PYTHONPATH=${PYTHONPATH#*/py4j-*-src.zip:}
export PYTHONPATH
exec "${PYSPARK_MILLSTREAM_PYTHON:?names the Python to run}" "$@"
