"""Tools for every layer: clock, promises, errors, logging, metrics. No module here knows the domain."""
