"""Millstream: one log, every door.

    millstream.open("sqlite:app.db")        a broker in this process (also file:, memory:, postgresql://)
    millstream.connect("127.0.0.1:9092")    a server, or any Kafka cluster for what Kafka has
    millstream.sync                         the same verbs without async, for scripts and notebooks

Attributes are loaded at first use: importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream import sync
    from millstream.client.api import Millstream
    from millstream.client.embedded import Embedded as open
    from millstream.client.iterators import Exclusive, Queue, Reading, Stream, Streams
    from millstream.client.records import Event, Job, Message, Record, Sent
    from millstream.client.remote import Remote as connect
    from millstream.client.sending import Sender
    from millstream.core.errors import (
        BufferFull,
        Closed,
        LeaseLost,
        MillstreamError,
        NotActive,
        NotMember,
        OutOfRange,
        RequestError,
        SendFailed,
        StartupError,
        TooLarge,
        TopicExists,
        Undecodable,
        UnknownTopic,
        Unreachable,
        Unsupported,
    )

_MODULES = {
    "millstream.client.api": ("Millstream",),
    "millstream.client.iterators": ("Exclusive", "Queue", "Reading", "Stream", "Streams"),
    "millstream.client.records": ("Event", "Job", "Message", "Record", "Sent"),
    "millstream.client.sending": ("Sender",),
}
_RENAMED = {"open": ("millstream.client.embedded", "Embedded"), "connect": ("millstream.client.remote", "Remote")}

__all__ = [
    "BufferFull",
    "Closed",
    "Event",
    "Exclusive",
    "Job",
    "LeaseLost",
    "Message",
    "Millstream",
    "MillstreamError",
    "NotActive",
    "NotMember",
    "OutOfRange",
    "Queue",
    "Reading",
    "Record",
    "RequestError",
    "SendFailed",
    "Sender",
    "Sent",
    "StartupError",
    "Stream",
    "Streams",
    "TooLarge",
    "TopicExists",
    "Undecodable",
    "UnknownTopic",
    "Unreachable",
    "Unsupported",
    "connect",
    "open",
    "sync",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    if name == "sync":
        return importlib.import_module("millstream.sync")
    homes = (module for module, names in _MODULES.items() if name in names)
    module, attribute = _RENAMED.get(name) or (next(homes, "millstream.core.errors"), name)
    found = getattr(importlib.import_module(module), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
