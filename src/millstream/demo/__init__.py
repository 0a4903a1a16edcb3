"""`make demo`: a broker, real clients, a `kill -9` in the middle, a pipeline on Spark, and the counts of it all."""
