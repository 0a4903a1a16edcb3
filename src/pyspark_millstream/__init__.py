"""Spark finds this package by its name: every session knows `format("millstream")` without a JAR or
registering.
"""

from millstream.spark.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
