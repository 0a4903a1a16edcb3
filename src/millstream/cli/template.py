"""The format of `consume -f`, in kcat's letters.

%t topic   %p partition   %o offset   %T timestamp in milliseconds   %h headers (k=v,k=v)
%k key     %K its length  %v or %s value  %S its length  (a length is -1 if there is none)  %% a percent sign
\\n \\t \\r \\0 \\\\ and \\xHH as usual

`luxun-pack` instead of letters shows the messages in packs that Luxun's clients wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from millstream.admin.failure import Failure

if TYPE_CHECKING:
    from confluent_kafka import Message

Render = Callable[["Message"], bytes]

_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(?P<letter>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)|(?P<text>[^%\\]+)", re.DOTALL)


def _headers(message: Message) -> bytes:
    headers = message.headers() or []
    pairs = headers.items() if isinstance(headers, dict) else headers
    return b",".join(name.encode() + b"=" + _bytes(value) for name, value in pairs)


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def _length(value: bytes | None) -> bytes:
    return b"-1" if value is None else b"%d" % len(value)


_LETTERS: dict[str, Render] = {
    "t": lambda message: (message.topic() or "").encode(),
    "p": lambda message: b"%d" % (message.partition() or 0),
    "o": lambda message: b"%d" % (message.offset() or 0),
    "T": lambda message: b"%d" % message.timestamp()[1],
    "h": _headers,
    "k": lambda message: message.key() or b"",
    "K": lambda message: _length(message.key()),
    "v": lambda message: message.value() or b"",
    "s": lambda message: message.value() or b"",
    "S": lambda message: _length(message.value()),
}


def _unpacked(message: Message) -> bytes:
    from millstream.wire.luxun import BadPack, unpack

    try:
        return b"".join(each + b"\n" for each in unpack(message.value() or b""))
    except BadPack as error:
        where = f"{message.topic()} partition {message.partition()} offset {message.offset()}"
        raise Failure(f"{where}: {error}; leave out --format to see it as it is") from None


NAMED: dict[str, Render] = {"luxun-pack": _unpacked}
"""Named formats: the messages of a Luxun client's pack, a line each."""


def compile_template(text: str) -> Render:
    """Parsed once, so that a record costs a call per letter."""
    if text in NAMED:
        return NAMED[text]
    parts: list[bytes | Render] = []
    for token in _TOKEN.finditer(text):
        letter, code, escape, plain = token.group("letter", "hex", "escape", "text")
        if plain is not None:
            parts.append(plain.encode())
        elif code is not None:
            parts.append(bytes([int(code, 16)]))
        elif escape is not None and escape in _ESCAPES:
            parts.append(_ESCAPES[escape])
        elif letter == "%":
            parts.append(b"%")
        elif letter is not None and letter in _LETTERS:
            parts.append(_LETTERS[letter])
        else:
            raise typer.BadParameter(
                f"{token.group()!r} is not known; there are %{' %'.join(_LETTERS)} and \\n \\t \\xHH"
            )
    if parts == [_LETTERS["v"], b"\n"]:  # the default, without the loop
        return lambda message: (message.value() or b"") + b"\n"
    return lambda message: b"".join([part if isinstance(part, bytes) else part(message) for part in parts])
