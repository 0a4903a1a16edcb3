"""`millstream comet`: a broker with Comet's own flags."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli import serving

FLAGS = {
    "DATA_DIR": "--data-dir",
    "ADDR": "--addr",
    "ETCD": "--etcd",
    "LOG_LEVEL": "--log-level",
    "BROKER_ID": "--broker-id",
    "ADVERTISE_ADDR": "--advertise-addr",
}


def comet(
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Where data lives.", show_default="data")] = None,
    addr: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where Comet clients connect.", show_default=":6174")
    ] = None,
    etcd: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Where metadata live, if not with the data.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warn or error.")] = None,
    broker_id: Annotated[str | None, typer.Option(metavar="ID", help="This broker's id for Comet clients.")] = None,
    advertise_addr: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The address that Comet clients are given.")
    ] = None,
) -> None:
    """Run a broker with Comet's flags and defaults; the COMET_... variables and those of `serve` apply, too.

    The broker has the doors of `serve` as well: Kafka on 127.0.0.1:9092, metrics on 127.0.0.1:8092.
    """
    import os

    from millstream.config import comet_settings, load

    given = dict(zip(FLAGS, (data_dir, addr, etcd, log_level, broker_id, advertise_addr), strict=True))
    flags = comet_settings(given, FLAGS.__getitem__)
    _, sources = load({}, os.environ)
    for name, setting, default in (("DATA_DIR", "store", "data"), ("ADDR", "comet", ":6174")):
        if given[name] is None and sources[setting] == "default":
            flags["data" if setting == "store" else setting] = default
    raise typer.Exit(serving.run(flags))
