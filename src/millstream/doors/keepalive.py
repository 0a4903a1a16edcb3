"""TCP keep-alive (RFC 9293), for connections that may be idle for long.

Producers of Luxun and Flume keep one connection for their whole life. If Luxun's producer sends a oneway item over a
connection that the broker has closed, the item is lost without an error. So these doors close no idle connection: TCP
keep-alive detects dead clients. Only a full door evicts a quiet connection for a new client (`connections.py`).

Kafka's clients reconnect, so that door closes idle connections. But a dead client may have a request that waits for
minutes, and only keep-alive detects that.
"""

from __future__ import annotations

import socket

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Detects a silently dead client within two minutes."""


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
