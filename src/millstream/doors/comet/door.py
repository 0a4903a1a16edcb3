"""The Comet door: `serve --comet HOST:PORT`. `wire/comet.py` has its messages, `service.py` its calls.

gRPC's server runs on the broker's event loop (grpc.aio), with its own thread for its completion queue. All calls are
unary. The door registers them as calls with a stream of requests, which is the same on the wire, and reads one request.
So the door decides when a request is read into memory (`calls.py`), and parses it itself.

Bad input costs its own call: bytes that are no message get INVALID_ARGUMENT, a request above 4 MiB RESOURCE_EXHAUSTED,
an unknown method UNIMPLEMENTED. All other errors are in the answer's `error` field, with status OK.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millstream.broker.session import Sessions
from millstream.config import Address
from millstream.core.errors import ProtocolError, RequestError, StartupError
from millstream.core.logs import Damped
from millstream.doors.comet.calls import CALLS_MAX, REQUEST_BYTES_MAX, Calls
from millstream.doors.comet.service import ELEMENTS_MAX, Service, error_text
from millstream.doors.message_size import GRPC_BYTES_MAX
from millstream.wire import comet

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

STREAMS_MAX = 100
"""Calls in flight over one connection; a client holds back the others."""
METADATA_BYTES_MAX = 16 << 10
HANDSHAKE_MS_MAX = 10_000
CLOSE_SECONDS_MAX = 2.0
WILDCARDS = ("0.0.0.0", "::")
UNEXPECTED = "unexpected error in the broker; see its log"
ROOMY = ("Consume", "Poll", "ListTopics", "GetMetadata")
"""Calls whose answer is not bounded by their request."""


def _options(connections_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port that another broker has is an error
        ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        # Detects dead clients, and lets clients do the same as often as gRPC allows them to.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class CometDoor:
    name = "comet"

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._config = sessions.config
        self._metrics = sessions.metrics
        self._calls = Calls(sessions.config, sessions.clock, sessions.metrics)
        self._service = Service(sessions.config)
        self._server: Any = None

    async def start(self, address: Address) -> Address:
        self._server = grpc.aio.server(
            options=_options(self._config.connections_max), maximum_concurrent_rpcs=CALLS_MAX
        )
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(self._handler(name, method))
            for name, method in comet.METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(comet.SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {address} for Comet clients; free the port, or choose another with --comet "
                "HOST:PORT (port 0 takes a free one)"
            ) from error
        opened = Address(address.host, port)
        await self._sessions.register(self.name, self._config.comet_broker_id, self._advertised(opened))
        await self._server.start()
        self._calls.start()
        return opened

    async def close(self) -> None:
        self._calls.stop()
        if self._server is not None:
            await self._server.stop(CLOSE_SECONDS_MAX)

    def _advertised(self, opened: Address) -> str:
        config = self._config
        if config.comet_advertise:
            text = config.comet_advertise
            return text if text.startswith(":") else str(Address.parse(text, opened.port))
        if config.advertised_address is not None:
            return str(Address(config.advertised_address.host, opened.port))
        return f":{opened.port}" if opened.host in WILDCARDS else str(opened)

    def _handler(self, name: str, method: comet.Method) -> Callable[[object, Any], Awaitable[bytes]]:
        handle = self._service.handlers[name]
        has_error = "error" in method.response.DESCRIPTOR.fields_by_name
        is_roomy = name in ROOMY

        def parse(data: bytes) -> Any:
            if name == "Produce":
                return comet.read_produce(data, self._sessions.clock.now_ms(), ELEMENTS_MAX)
            comet.check_elements(name, data, ELEMENTS_MAX)
            return method.request.FromString(data)

        async def serve(requests: object, context: Any) -> bytes:
            call = await self._calls.open(context)
            try:
                request = parse(await call.read(context))
            except (DecodeError, ProtocolError) as error:
                self._refuse(call.host, name, str(error))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the {name} request is not valid: {error}")
            if is_roomy:
                await call.await_room(GRPC_BYTES_MAX)
            try:
                session = self._sessions.open(self.name, call.host, self.name)
                response = await handle(session, request)
            except RequestError as error:
                text = error_text(error, request)
                self._refuse(call.host, name, text)
                response = method.response(error=text)
            except Exception:
                logger.exception("unexpected error in Comet's %s", name)
                self._metrics.request_errors += 1
                if not has_error:
                    await context.abort(grpc.StatusCode.INTERNAL, UNEXPECTED)
                response = method.response(error=UNEXPECTED)
            answer: bytes = response if isinstance(response, bytes) else response.SerializeToString()
            call.answers(len(answer))
            return answer

        return serve

    def _refuse(self, host: str, name: str, text: str) -> None:
        self._metrics.request_errors += 1
        refusals.warning("%s from %s was refused: %s", name, host, text)
