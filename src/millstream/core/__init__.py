"""What every layer may use: clock, promises, errors, logging, metrics. Nothing here knows the domain."""
