"""What a protocol is to the engine of its connections (`connection.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct
from typing import ClassVar

from millstream.core.errors import ProtocolError

LENGTH = Struct(">i")


class Protocol(ABC):
    """Turns a client's bytes into requests, and answers into chunks in the outbox."""

    __slots__ = ()

    HEAD_BYTES: ClassVar[int] = 4
    """A frame begins with a head. Its last 4 bytes are the count of the bytes behind it."""

    @abstractmethod
    def take(self, data: memoryview) -> int:
        """Handles whole frames until the connection is parked or waits for its client; returns how many bytes those
        were. A `ProtocolError` goes to `refused`.
        """

    @abstractmethod
    def refused(self, error: ProtocolError) -> None: ...

    @abstractmethod
    def ended(self) -> None:
        """The end of the stream was read, or seen while the connection is parked."""

    @abstractmethod
    def hung_up(self) -> None:
        """The client hung up while the connection is not read."""

    def sent(self) -> None:
        """All answers were sent, and `Connection.room` is not 0."""
        raise NotImplementedError

    def stalled(self) -> None:  # noqa: B027  # most protocols push nothing
        """The client does not read: answers wait for it."""

    def caught_up(self) -> None:  # noqa: B027
        """The client has read the answers that waited for it."""

    @abstractmethod
    def closed(self) -> None:
        """Called once, before the transport closes."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no request waits for its answer."""

    @property
    @abstractmethod
    def is_owed(self) -> bool:
        """Whether writes are in flight."""

    @property
    @abstractmethod
    def waits_for_others(self) -> bool:
        """Whether a request waits for records or other members."""

    @property
    def may_resume(self) -> bool:
        """Whether further bytes may be taken when the connection got the memory that it waited for."""
        return True


class Closed(Protocol):
    """Takes the protocol's place in a closed connection. Without it, the two would keep each other, with unsent answers
    and their file descriptors, until a garbage collection.
    """

    __slots__ = ()

    def take(self, data: memoryview) -> int:
        return len(data)

    def refused(self, error: ProtocolError) -> None: ...

    def ended(self) -> None: ...

    def hung_up(self) -> None: ...

    def closed(self) -> None: ...

    is_idle = True
    is_owed = False
    waits_for_others = False


CLOSED = Closed()
