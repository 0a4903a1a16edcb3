"""The work of `millstream serve`, apart from the declaration of its flags.

A broker keeps the imports of its command line for months. The library behind the commands (Typer, and
pydantic under it) costs 10 MB and 0.1 s at start, so `main` calls `plain_flags` first: a command line of known flags
with values needs no library. Anything else, including `--help` and mistakes, goes through Typer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

DOORS = ("kafka", "http", "flowmq", "flume", "luxun", "comet")
WITH_VALUE = ("store", "meta", "data", *DOORS, "config", "flush", "log_level", "advertise", "node_id")
SWITCHES = ("allow_unauthenticated",)


def plain_flags(arguments: Sequence[str]) -> dict[str, object] | None:
    """The flags of `serve`, if there are no other arguments; else None."""
    flags: dict[str, object] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name != "--" + field.replace("_", "-"):
            return None
        if field in SWITCHES and not equals:
            flags[field] = True
        elif field in WITH_VALUE and (equals or (rest and not rest[0].startswith("-"))):
            flags[field] = value if equals else rest.pop(0)
        else:
            return None
    return flags


def run(flags: Mapping[str, object]) -> int:
    from millstream import server
    from millstream.config import load
    from millstream.core import logs

    settings, _ = load(flags, os.environ)
    logs.configure(settings.log_level, settings.log_format)
    return server.run(settings)
