"""Pipelines declared in one file: the source, its decoding, SQL steps, and the sinks."""
