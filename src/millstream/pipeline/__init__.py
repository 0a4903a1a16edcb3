"""Pipelines declared in one file: what is read, how it is decoded, SQL steps, and where the results go."""
