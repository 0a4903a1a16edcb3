#!/bin/sh
# The Python of a local Spark's processes, without the zipped pyspark on its path: see interpreter.py. Spark puts it there
# more than once, and an archive of Java classes with it. All else stays, in its order.
set -fu
IFS=:
kept=
for each in ${PYTHONPATH-}; do
  case $each in
    "$PYSPARK_MILLSTREAM_SPARK"/python/lib/*.zip | "$PYSPARK_MILLSTREAM_SPARK"/jars/*.jar) ;;
    *) kept=$kept:$each ;;
  esac
done
PYTHONPATH=${kept#:}
export PYTHONPATH
exec "$PYSPARK_MILLSTREAM_PYTHON" "$@"
