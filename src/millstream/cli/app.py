"""The `millstream` command, assembled from the nouns.

Nothing here or in the nouns imports `confluent_kafka`, `rich`, `pyspark` or the broker at import: `--help` and `serve`
start fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli import comet, config, consume, doors, group, log, pipeline, produce, query, queue, serve, topic

app = typer.Typer(
    name="millstream",
    help="A durable, partitioned log that every Kafka client can use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"millstream {version('millstream')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(serve.serve)
app.command()(comet.comet)
app.add_typer(topic.app, name="topic")
app.command()(produce.produce)
app.command()(consume.consume)
app.add_typer(group.app, name="group")
app.add_typer(queue.app, name="queue")
app.add_typer(log.app, name="log")
app.add_typer(pipeline.app, name="pipeline")
app.command()(query.query)
app.add_typer(doors.app, name="doors")
app.add_typer(config.app, name="config")
