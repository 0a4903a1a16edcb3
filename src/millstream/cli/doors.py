"""`millstream doors`: how clients of the other protocols connect."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(help="Files and settings for clients of the other protocols.", no_args_is_help=True)


@app.callback()
def doors() -> None:
    pass


@app.command(no_args_is_help=True)
def luxun(
    idl: Annotated[
        bool, typer.Option("--idl", help="Print the path of the Thrift IDL, to generate clients from.")
    ] = False,
    hash_password: Annotated[
        bool, typer.Option("--hash-password", help="Read a password and print its hash for luxun_password.")
    ] = False,
) -> None:
    """Luxun clients: Thrift, framed transport, binary protocol, on `serve --luxun HOST:PORT`."""
    if idl:
        from millstream.wire.luxun import IDL

        print(IDL)
    if hash_password:
        from millstream.doors.luxun.password import hash_password as hashed

        print(hashed(_read_password()))


@app.command(no_args_is_help=True)
def comet(
    idl: Annotated[
        bool, typer.Option("--idl", help="Print the path of the protobuf IDL, to generate clients from.")
    ] = False,
) -> None:
    """Comet clients: gRPC, on `serve --comet HOST:PORT`; `millstream comet` takes Comet's own flags."""
    if idl:
        from importlib.resources import files

        print(files("millstream.wire") / "comet.proto")  # without the libraries that `wire/comet.py` needs


def _read_password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    import getpass

    return getpass.getpass("password: ")
