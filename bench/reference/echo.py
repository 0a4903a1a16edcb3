"""The limit of a small request in Python: a uvloop server that answers each frame with the same frame.

    python -m bench.reference.echo

A plain `asyncio.Protocol`: cut the stream at the length prefixes, one `transport.write` per frame, nothing else. It
says `ready PORT` and runs until it is stopped.
"""

from __future__ import annotations

import asyncio
from typing import cast

import uvloop


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour, not by inheritance
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        if self.rest:
            data = self.rest + data
        at, size = 0, len(data)
        while size - at >= 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > size:
                break
            self.transport.write(data[at:end])
            at = end
        self.rest = data[at:]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
