"""`millstream log`: the contents of segment files, and checks of stored data."""

from __future__ import annotations

import typer

from millstream.cli import log_dump, log_verify

app = typer.Typer(help="Print segment files and verify stored records.", no_args_is_help=True)

app.command()(log_verify.verify)
app.command()(log_dump.dump)
