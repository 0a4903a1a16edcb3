"""Frames with a length in front, damaged at random, for the doors that speak them."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time

NUMBERS = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x00\x00\xff\xff", b"\x0f\x0f\x0f\x0f")
"""Lengths and counts that lie."""


def attack(address: str, sound: list[bytes], seed: int, *, header: int, body: int | None = None) -> None:
    """Sends damaged copies of sound frames on 50 connections. The header stays whole unless a bit flips in it; `body`
    is where random bytes begin.
    """
    generator = random.Random(seed)
    body = body or header
    for _ in range(50):
        stream = bytearray()
        for _ in range(10):
            frame = bytearray(generator.choice(sound))
            how = generator.randrange(5)
            if how == 0:
                frame[generator.randrange(len(frame))] ^= 1 << generator.randrange(8)
            elif how == 1:
                del frame[generator.randrange(header, len(frame)) :]
            elif how == 2:
                at = generator.randrange(header, len(frame))
                frame[at : at + 4] = generator.choice(NUMBERS)
            elif how == 3:
                frame[body:] = generator.randbytes(generator.randrange(200))
            if how in (1, 2, 3):
                frame[:4] = struct.pack(">i", len(frame) - 4)
            stream += frame
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(stream)
                connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + 5
            with contextlib.suppress(OSError):
                connection.settimeout(0.1)
                while connection.recv(1 << 16) and time.monotonic() < deadline:
                    pass
