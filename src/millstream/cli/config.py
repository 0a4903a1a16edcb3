"""`millstream config`: the settings that `serve` would use here, and their sources."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.output import Format, OutputOption, show_json, show_table

app = typer.Typer(help="Show the settings of a broker that is started here.", no_args_is_help=True)


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A TOML file with settings.")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show every setting, its value, and where the value came from."""
    from millstream.config import doc, load, shown, without_secrets

    settings, sources = load({"config": config}, os.environ)
    rows = [
        {"name": name, "value": shown(name, value), "source": sources[name], "doc": doc(name)}
        for name, value in dataclasses.asdict(settings).items()
    ]
    for row in rows:
        if row["name"] in ("store", "meta"):
            row["value"] = without_secrets(str(row["value"]))
    if output is Format.JSON:
        show_json({row["name"]: {key: row[key] for key in ("value", "source", "doc")} for row in rows})
        return
    for row in rows:
        row["value"] = str(row["value"]).lower() if isinstance(row["value"], bool) else str(row["value"])
    show_table({"name": "SETTING", "value": "VALUE", "source": "FROM", "doc": "DESCRIPTION"}, rows, "")
