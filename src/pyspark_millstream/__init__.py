"""Found by Spark by its name: makes `format("millstream")` known to every session, without a JAR and without
registering.
"""

from millstream.spark.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
