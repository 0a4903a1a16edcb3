"""The end of a command that uses librdkafka, even if the broker does not respond.

Ctrl-C is deferred during calls: an exception that a signal raises inside one of librdkafka's callbacks may be lost on
the way out of C, and the command then goes on, or ends with a SystemError. It is raised after the call.

A consumer that closes first commits and leaves its group. If the broker does not respond, that takes over a minute.
The close may take `CLOSE_SECONDS`, or until a second Ctrl-C. A thread that is stuck then must not delay the end of the
process (`leave`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from confluent_kafka import Consumer, Message, Producer

CLOSE_SECONDS = 5.0


class _Interrupts:
    def __init__(self) -> None:
        self._is_held = self._has_come = False

    def take(self) -> None:
        """Installs the handler, unless the program has its own."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._is_held:
            raise KeyboardInterrupt
        self._has_come = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """For a short call."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._has_come:
            self._has_come = False
            raise KeyboardInterrupt


_interrupts = _Interrupts()
_closing = 0


def leave(code: int) -> NoReturn:
    """Ends the process, even if a thread hangs that Python would wait for."""
    if _closing:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class InterruptibleConsumer(Consumer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _interrupts.take()
        super().__init__(*args, **kwargs)

    def poll(self, *args: Any, **kwargs: Any) -> Message | None:
        with _interrupts.held():
            return super().poll(*args, **kwargs)

    def consume(self, *args: Any, **kwargs: Any) -> list[Message]:
        with _interrupts.held():
            return super().consume(*args, **kwargs)

    def close(self) -> None:
        global _closing
        _closing += 1
        thread = threading.Thread(target=super().close, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            print("millstream: the broker does not answer; the last records may be delivered again", file=sys.stderr)
        else:
            _closing -= 1


class InterruptibleProducer(Producer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _interrupts.take()
        super().__init__(*args, **kwargs)

    def poll(self, *args: Any, **kwargs: Any) -> int:
        with _interrupts.held():
            return super().poll(*args, **kwargs)

    def flush(self, *args: Any, **kwargs: Any) -> int:
        with _interrupts.held():
            return super().flush(*args, **kwargs)
