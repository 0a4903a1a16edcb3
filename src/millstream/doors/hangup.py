"""Detects hang-ups of clients, whether or not their connections are read.

A parked connection is not read while its client's bytes wait in the socket, so it never reads the end of the stream.
And uvloop stops reporting a reset socket after its first event, although there is more to read. So one epoll instance
watches every connection of a door for RDHUP, HUP and ERR only; the event loop watches the instance. Requests do not
wake it: a connection costs two system calls in its life, and none per request.

    event           the client                                            reported
    end of stream   closed, or closed its sending side only (`nc -N`)     once
    reset           closed with unread responses, or refused one          in every turn until `forget`

An end of stream looks the same in both cases. So the door still handles the client's requests and sends its responses,
but it does not wait for other clients on its behalf.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

EVENTS_PER_TURN = 256
_RESET = select.EPOLLHUP | select.EPOLLERR
"""The kernel always reports these events."""

Noticed = Callable[[bool], None]
"""Called with True after a reset, with False at the end of the client's stream."""


class HangUps:
    """The hang-ups of one door."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, Noticed] = {}
        loop.add_reader(self._epoll.fileno(), self._notice)

    def watch(self, descriptor: int, noticed: Noticed) -> None:
        self._watched[descriptor] = noticed
        self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        """Call before the socket closes: the next connection may get its descriptor."""
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._watched.clear()

    def _notice(self) -> None:
        for descriptor, events in self._epoll.poll(0, EVENTS_PER_TURN):
            noticed = self._watched.get(descriptor)
            if noticed is None:  # an earlier callback closed it
                continue
            noticed(bool(events & _RESET))
            if self._watched.get(descriptor) is noticed:
                self._epoll.modify(descriptor, 0)
