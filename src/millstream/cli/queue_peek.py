"""`millstream queue peek`: the records that a queue delivers next, without leasing them.

The broker lists those records (its page `/queues`); they are read from the log like any records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.consume import Shape, render_json
from millstream.cli.failure import explain
from millstream.cli.pages import queues
from millstream.cli.queue_group import missing
from millstream.cli.template import compile_template

if TYPE_CHECKING:
    from confluent_kafka import Message

READ_SECONDS = 5.0
DELIVER_AT = "millstream-deliver-at"


def peek(
    topic: Annotated[str, typer.Argument(show_default=False)],
    group: Annotated[str, typer.Option("--group", "-g", help="Whose next records.", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="At most so many.")] = 10,
    template: Annotated[
        str, typer.Option("--format", "-f", help="%t topic %p partition %o offset %T time %k key %v value %h headers.")
    ] = r"%p %o %v\n",
    output: Annotated[Shape, typer.Option("--output", "-o", help="json: an object a line.")] = Shape.TEXT,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Show the records that are available next, without leasing them: workers may get them meanwhile."""
    render = render_json if output is Shape.JSON else compile_template(template)
    connection = Connection(broker)
    connection.topic(topic)
    found = [queue for queue in queues(connection) if queue["group"] == group]
    if not found:
        raise missing(group)
    left = count
    for partition in found[0]["partitions"]:
        if partition["topic"] != topic:
            continue
        for message in _read(connection, topic, partition, left):
            sys.stdout.buffer.write(render(message))
            left -= 1
    sys.stdout.buffer.flush()
    if left == count:
        print(f"nothing of {topic} is available to {group} now", file=sys.stderr)


def _read(connection: Connection, topic: str, partition: dict[str, Any], count: int) -> Iterator[Message]:
    """Records of the next runs, in order of offset."""
    from confluent_kafka import TopicPartition

    runs = partition["ahead"]
    if not runs or count <= 0:
        return
    consumer = connection.consumer(
        {
            "group.id": "millstream-cli",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        for first, last in runs:
            consumer.assign([TopicPartition(topic, partition["partition"], first)])
            while count > 0:
                message = consumer.poll(READ_SECONDS)
                if message is None:
                    return
                error = message.error()
                if error is not None and error.code() == error._PARTITION_EOF:
                    break
                if error is not None:
                    raise explain(error, connection.address)
                if (message.offset() or 0) > last:
                    break
                if not _is_delayed(message):
                    yield message
                    count -= 1
                if message.offset() == last:
                    break
    finally:
        consumer.close()


def _is_delayed(message: Message) -> bool:
    """The queue has not read it yet and does not know its delay."""
    headers: Any = message.headers() or []
    due: bytes = dict(headers).get(DELIVER_AT) or b""
    return due.isdigit() and int(due) > time.time() * 1000
