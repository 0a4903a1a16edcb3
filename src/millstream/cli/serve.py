"""`millstream serve`: a broker, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli import serving

HostPort = "HOST:PORT"


def serve(
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where data lives: file:DIR, sqlite:FILE, postgresql://…, memory:."),
    ] = None,
    meta: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where metadata live if not with the logs: sqlite:FILE, postgresql://…, etcd://…."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Short for --store file:DIR.")] = None,
    kafka: Annotated[str | None, typer.Option(metavar=HostPort, help="Where Kafka clients connect.")] = None,
    http: Annotated[str | None, typer.Option(metavar=HostPort, help="Metrics and health pages; off closes it.")] = None,
    flowmq: Annotated[
        str | None, typer.Option(metavar=HostPort, help="Where FlowMQ clients connect; off unless given.")
    ] = None,
    flume: Annotated[str | None, typer.Option(metavar=HostPort, help="Where Flume clients connect.")] = None,
    luxun: Annotated[str | None, typer.Option(metavar=HostPort, help="Where Luxun clients (Thrift) connect.")] = None,
    comet: Annotated[
        str | None, typer.Option(metavar=HostPort, help="Where Comet clients (gRPC) connect; HOST alone: port 6174.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A TOML file with settings.")] = None,
    flush: Annotated[
        str | None, typer.Option(metavar="WHEN", help="When appends are synced: always, os, every=N, every=Tms.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    advertise: Annotated[str | None, typer.Option(metavar=HostPort, help="The address that clients are given.")] = None,
    node_id: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="This broker's node id, if several share a store.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool | None, typer.Option("--allow-unauthenticated", help="Accept unauthenticated clients from other machines.")
    ] = None,
) -> None:
    """Run a broker: Kafka on 127.0.0.1:9092, metrics on 127.0.0.1:8092.

    Flags win over MILLSTREAM_... variables, those over the file, that over the defaults; `config show` tells which did.
    """
    raise typer.Exit(serving.run(locals()))
