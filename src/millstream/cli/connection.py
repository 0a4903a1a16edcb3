"""The command line's connection to a broker: quiet, and interruptible.

librdkafka logs its errors to standard error. Here its log is discarded; with MILLSTREAM_DEBUG=1, it goes to standard
error.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from millstream.admin import connection

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer

INT32_MAX = 0x7FFF_FFFF
"""The largest partition count or partition number on the wire."""
BrokerOption = Annotated[
    str,
    typer.Option(
        "--broker", "-b", metavar="HOST:PORT", envvar="MILLSTREAM_BROKER", help="The broker; several with commas."
    ),
]
DEFAULT_BROKER = "127.0.0.1:9092"


class Connection(connection.Connection):
    client_id: ClassVar = "millstream-cli"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._announced = False
        debug = os.environ.get("MILLSTREAM_DEBUG", "") not in ("", "0")
        self._logger.propagate = False
        self._logger.handlers[:] = [logging.StreamHandler() if debug else logging.NullHandler()]

    def _clients(self) -> tuple[type[Producer], type[Consumer]]:
        from millstream.cli.interrupt import InterruptibleConsumer, InterruptibleProducer

        return InterruptibleProducer, InterruptibleConsumer

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == error._ALL_BROKERS_DOWN and not self._announced:
            self._announced = True
            print(f"millstream: lost the broker at {self.address}; reconnecting", file=sys.stderr)
