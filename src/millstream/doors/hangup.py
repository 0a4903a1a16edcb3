"""Notices that clients hang up, whether or not their connections are read.

A parked connection has no reader while bytes of its client wait in the socket, so it never reads the end of the
stream. And uvloop stops to report a socket that was reset after its first event, although there is more to read. So one
epoll instance watches every connection of a door for RDHUP, HUP and ERR alone; the event loop watches the instance.
Requests do not wake it: a connection costs two system calls in its life, and none per request.

    event           the client                                            told
    end of stream   closed, or closed its sending side only (`nc -N`)     once
    reset           closed with answers unread, or refused one            in every turn until `forget`

An end of stream looks the same in both cases, so it is no reason to drop what the client is owed, or what it sent. It
is a reason to wait for nothing on its behalf.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

EVENTS_PER_TURN = 256
_RESET = select.EPOLLHUP | select.EPOLLERR
"""The kernel reports these whether or not they are asked for."""

Noticed = Callable[[bool], None]
"""Is told whether the connection was reset, or only the client's stream has ended."""


class HangUps:
    """Of one door."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, Noticed] = {}
        loop.add_reader(self._epoll.fileno(), self._notice)

    def watch(self, connected: socket.socket, noticed: Noticed) -> None:
        self._watched[connected.fileno()] = noticed
        self._epoll.register(connected.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, connected: socket.socket) -> None:
        """Before the socket is closed: its number may be the next connection's."""
        if self._watched.pop(connected.fileno(), None) is not None:
            self._epoll.unregister(connected.fileno())

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._watched.clear()

    def _notice(self) -> None:
        for descriptor, events in self._epoll.poll(0, EVENTS_PER_TURN):
            noticed = self._watched.get(descriptor)
            if noticed is None:  # closed by one of those before it
                continue
            noticed(bool(events & _RESET))
            if self._watched.get(descriptor) is noticed:
                self._epoll.modify(descriptor, 0)
