#!/bin/sh
# The Python of a local Spark's processes, without the zipped pyspark on its path: see interpreter.py. Only from its
# front: before it stands what others have put there, such as `spark-submit --py-files`, and stays.
case ${PYTHONPATH%%:*} in */pyspark.zip) PYTHONPATH=${PYTHONPATH#*:} ;; esac
case ${PYTHONPATH%%:*} in */py4j-*-src.zip) PYTHONPATH=${PYTHONPATH#*:} ;; esac
export PYTHONPATH
exec "${PYSPARK_MILLSTREAM_PYTHON:?names the Python to run}" "$@"
