"""`millstream queue peek`: the records that a queue delivers next, without leasing them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from millstream.admin import peek as admin
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.consume import Shape, render_json
from millstream.cli.template import compile_template


def peek(
    topic: Annotated[str, typer.Argument(show_default=False)],
    group: Annotated[str, typer.Option("--group", "-g", help="The queue to look into.", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="At most this many.")] = 10,
    template: Annotated[
        str, typer.Option("--format", "-f", help="%t topic %p partition %o offset %T time %k key %v value %h headers.")
    ] = r"%p %o %v\n",
    output: Annotated[Shape, typer.Option("--output", "-o", help="json: one object per line.")] = Shape.TEXT,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Show the records that are available next, without leasing them; workers may lease them at any time."""
    render = render_json if output is Shape.JSON else compile_template(template)
    shown = 0
    for message in admin.peek(Connection(broker), group, topic, count):
        sys.stdout.buffer.write(render(message))
        shown += 1
    sys.stdout.buffer.flush()
    if not shown:
        print(f"no record of {topic} is available to {group} now", file=sys.stderr)
