"""TCP keep-alive, for connections that idleness must not close.

Producers of Luxun and Flume hold one connection for as long as they live. A oneway item that Luxun's producer sends
over a connection which the broker has closed is lost without an error. So idleness closes no connection: TCP's
keep-alive detects clients that are gone. Only where the door is full does a new client take the place of a quiet one
(`connections.py`).

Kafka's clients reconnect, so that door closes what is idle. But a client that is gone may have a request that waits for
minutes, and only the keep-alive notices.
"""

from __future__ import annotations

import socket

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A client that is gone without a word is detected in two minutes."""


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
