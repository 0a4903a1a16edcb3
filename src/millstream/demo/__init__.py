"""`make demo`: a broker, real clients, a `kill -9` in the middle, a pipeline on Spark, and a check of counts."""
