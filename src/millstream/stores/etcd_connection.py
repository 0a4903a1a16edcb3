"""The connection to etcd: to one member of its cluster, and to the next one when that member fails.

    absent --connect, authenticate, linearizable read--> connected --call fails or is late, watch ends--> absent

Rules
-----
1. Calls and the watch share one channel. Then the watch reports a change about when the call that made it is answered.
2. A member is used after it answered a linearizable read. A member that lost its leader does not.
3. A call that finds the member gone, or that it does not answer within `REQUEST_SECONDS`, drops the member. The next
   call connects to the member after it. While none answers, calls fail at once; `RETRY_SECONDS` pass between attempts.
4. No call is repeated: the outcome of a transaction that was sent is unknown. The exception is a call that etcd
   refused because of an expired token, before it executed it.
5. etcd's revisions never go back. If they do, it lost its data or was restored from a snapshot: then every call fails
   until a restart, which compares logs and metadata. Otherwise the broker would take lost topics for deleted ones.

Own stubs and no client library: `docs/decisions/0018-own-calls-to-etcd.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import Any, Protocol

import grpc
from aetcd import rpc

from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.logs import Damped
from millstream.stores.etcd_diagnosis import diagnose
from millstream.stores.etcd_transactions import encode_key
from millstream.stores.etcd_url import Endpoint, EtcdUrl, tls_context

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
"""For all members together; at least `MEMBER_SECONDS` for each."""
MEMBER_SECONDS = 1.0
REQUEST_SECONDS = 5.0
"""Longer than the election of a leader, which takes one to two seconds with etcd's defaults."""
RETRY_SECONDS = 0.2
PAGE_KEYS = 1_000
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else a silent member is noticed after 65 s instead of 14 s
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, without the backoff of the last one
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
_REQUIRE_LEADER = ("hasleader", "true")
"""etcd refuses the call, or ends the watch, if the member has no leader."""
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
_CORRUPTING = ("3.5.0", "3.5.1", "3.5.2")

Metadata = tuple[tuple[str, str], ...]


class Stream(Protocol):
    """A bidirectional gRPC call."""

    async def write(self, request: Any) -> None: ...

    async def read(self) -> Any: ...

    def cancel(self) -> bool: ...


class Unreachable(RequestError):
    """No member of etcd answers. If the call was sent, its outcome is unknown."""

    def __init__(self, location: str) -> None:
        super().__init__(Code.KAFKA_STORAGE_ERROR, f"{location} cannot be reached")


class Compacted(RequestError):
    """The revision is compacted: etcd no longer has the changes since then."""

    def __init__(self, location: str) -> None:
        super().__init__(Code.KAFKA_STORAGE_ERROR, f"{location} has compacted the revision")


class Member:
    """A channel to one member of the cluster."""

    def __init__(self, endpoint: Endpoint, credentials: Any) -> None:
        target = f"dns:///{endpoint}"
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        kv, maintenance = rpc.KVStub(self._channel), rpc.MaintenanceStub(self._channel)
        self.calls: dict[str, Any] = {
            "Range": kv.Range,
            "Txn": kv.Txn,
            "Put": kv.Put,
            "Compact": kv.Compact,
            "Status": maintenance.Status,
            "Authenticate": rpc.AuthStub(self._channel).Authenticate,
        }
        self.metadata: Metadata = ()
        """The token, once there is one."""
        self._watch = rpc.WatchStub(self._channel).Watch
        self._streams: set[Stream] = set()

    async def ready(self) -> None:
        """Returns when the server has answered in HTTP/2; raises `ConnectionError`."""
        while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise ConnectionError
            await self._channel.wait_for_state_change(state)

    def watch(self) -> Stream:
        stream: Stream = self._watch(metadata=(*self.metadata, _REQUIRE_LEADER))
        self._streams.add(stream)
        return stream

    def end(self, stream: Stream) -> None:
        self._streams.discard(stream)
        stream.cancel()

    async def close(self, grace_seconds: float | None = None) -> None:
        """Ends the watch now, and the calls in flight after the grace."""
        for stream in self._streams:
            stream.cancel()
        await self._channel.close(grace_seconds)


class EtcdConnection:
    def __init__(self, url: EtcdUrl) -> None:
        self._url = url
        self.location = url.location
        self.failure: str | None = None
        self._prefix = encode_key(url.prefix)
        self._credentials = _credentials(url)
        self._member: Member | None = None
        self._at = 0
        """The endpoint to try next."""
        self._connecting: asyncio.Task[Member] | None = None
        self._retry_at = 0.0
        self._cluster_id = 0
        self._revision = 0
        """The newest revision of all responses."""
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._damped = Damped(__name__)
        self._is_told = False

    # -- connecting --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            await self.member()
        except Unreachable:
            raise StartupError(f"{self.location} cannot be used: {await diagnose(self._url)}") from None
        except RequestError as error:
            raise StartupError(f"{self.location} cannot be used: {error.detail}") from None
        with contextlib.suppress(RequestError):
            version = (await self.call("Status", rpc.StatusRequest())).version
            if version in _CORRUPTING:
                logger.warning("etcd %s can corrupt its data in a crash (etcd issue 13766); upgrade it", version)

    async def member(self) -> Member:
        """The connected member; raises `Unreachable` if none answers."""
        if self._member is not None:
            return self._member
        if self._connecting is None:
            if self._is_closed or self.failure is not None:
                state = f"read-only: {self.failure}" if self.failure is not None else "closed"
                raise RequestError(Code.KAFKA_STORAGE_ERROR, f"the metadata store is {state}")
            if asyncio.get_running_loop().time() < self._retry_at:
                raise Unreachable(self.location)
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(self._connected)
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise Unreachable(self.location) from None  # the connection was closed

    def _connected(self, done: asyncio.Task[Member]) -> None:
        self._connecting = None
        if done.cancelled() or done.exception() is not None:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS

    async def _connect(self) -> Member:
        endpoints = self._url.endpoints
        seconds = max(MEMBER_SECONDS, CONNECT_SECONDS / len(endpoints))
        for _ in endpoints:
            member = Member(endpoints[self._at], self._credentials)
            try:
                async with asyncio.timeout(seconds):
                    await member.ready()
                    member.metadata = await self._authenticate(member)
                    read = rpc.RangeRequest(key=self._prefix, keys_only=True)
                    response = await member.calls["Range"](read, metadata=(*member.metadata, _REQUIRE_LEADER))
            except (TimeoutError, ConnectionError):
                pass
            except grpc.aio.AioRpcError as error:
                if error.code() not in _GONE:
                    await member.close()
                    raise self._refusal(error) from error
            except BaseException:
                await member.close()
                raise
            else:
                self._compare(response.header)
                if self.failure is None:
                    self._member = member
                    return member
                await member.close()
                raise RequestError(Code.KAFKA_STORAGE_ERROR, f"the metadata store is read-only: {self.failure}")
            await member.close()
            self._at = (self._at + 1) % len(endpoints)
        raise Unreachable(self.location)

    def _compare(self, header: rpc.ResponseHeader) -> None:
        """Rule 5."""
        is_other = self._cluster_id not in (0, header.cluster_id)
        if is_other or header.revision < self._revision:
            found = "another cluster" if is_other else f"revision {header.revision} after {self._revision}"
            self.failure = (
                f"etcd lost its data or was restored from a snapshot ({found}); restart the broker when etcd has the "
                "metadata that belong to its logs"
            )
            logger.critical("%s is read-only until the broker restarts: %s", self.location, self.failure)
        self._cluster_id = header.cluster_id

    async def _authenticate(self, member: Member) -> Metadata:
        if not self._url.user:
            return ()
        request = rpc.AuthenticateRequest(name=self._url.user, password=self._url.password)
        try:
            return (("token", (await member.calls["Authenticate"](request)).token),)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" not in (error.details() or ""):
                raise
        if not self._is_told:
            self._is_told = True
            logger.warning("%s does not check the user and the password: its authentication is off", self.location)
        return ()

    def drop(self, member: Member) -> None:
        """Connects to the next member from now on."""
        if self._member is not member:
            return
        self._member = None
        self._at = (self._at + 1) % len(self._url.endpoints)
        closing = asyncio.ensure_future(member.close(REQUEST_SECONDS))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._member is not None:
            member, self._member = self._member, None
            await member.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # -- calling -----------------------------------------------------------------------------------------------------

    async def call(self, name: str, request: Any) -> Any:
        """The response; raises `RequestError`."""
        try:
            return await self._call(name, request)
        except grpc.aio.AioRpcError as error:
            if not self._url.user or not _is_stale_token(error):
                raise self._refusal(error) from error
        try:  # with a new token
            return await self._call(name, request)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from error

    async def _call(self, name: str, request: Any) -> Any:
        member = self._member or await self.member()
        try:
            response = await member.calls[name](request, timeout=REQUEST_SECONDS, metadata=member.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in _GONE or _is_stale_token(error):
                self.drop(member)
            if error.code() in _GONE:
                raise Unreachable(self.location) from error
            raise
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise Unreachable(self.location) from None  # the channel was closed
        self._revision = max(self._revision, response.header.revision)
        return response

    async def revision(self) -> int:
        """The current one of the whole etcd."""
        response = await self.call("Range", rpc.RangeRequest(key=self._prefix, keys_only=True))
        return int(response.header.revision)

    async def pages(self, start: bytes, end: bytes, revision: int = 0) -> tuple[list[Any], int]:
        """All keys of a range at one revision, and that revision."""
        found: list[Any] = []
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, revision=revision, limit=PAGE_KEYS)
            response = await self.call("Range", request)
            found += response.kvs
            revision = revision or int(response.header.revision)
            if not response.more:
                return found, revision
            start = response.kvs[-1].key + b"\0"

    def _refusal(self, error: grpc.aio.AioRpcError) -> RequestError:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
            return Compacted(self.location)
        if "space exceeded" in details:
            self._damped.error("%s is full (alarm NOSPACE); compact and defragment it", self.location)
            text = f"{self.location} is full: compact and defragment etcd, then disarm its alarm NOSPACE"
        elif "too large" in details or "larger than max" in details:
            text = f"{self.location} refused a transaction as too large: raise etcd's --max-request-bytes"
        elif "authentication failed" in details:
            text = "etcd refuses the user or the password; correct them in the URL"
        elif "user name is empty" in details:
            text = "etcd asks for a user and a password: write etcd://USER:PASSWORD@HOST:PORT/PREFIX"
        elif error.code() is grpc.StatusCode.PERMISSION_DENIED:
            text = (
                f"the user {self._url.user} has no permission on keys under {self._url.prefix}: grant it with etcdctl "
                f"role grant-permission ROLE readwrite --prefix=true {self._url.prefix}"
            )
        elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
            text = "the server is not an etcd of version 3.4 or newer; correct the address"
        else:
            text = f"{self.location} refused: {details}"
        return RequestError(Code.KAFKA_STORAGE_ERROR, text)


def _is_stale_token(error: grpc.aio.AioRpcError) -> bool:
    return any(text in (error.details() or "") for text in _STALE_TOKEN)


def _is_cancelled() -> bool:
    """Whether the running task itself is cancelled; a closed channel also raises `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _credentials(url: EtcdUrl) -> Any:
    if tls_context(url) is None:
        return None
    ca = url.ca or ssl.get_default_verify_paths().cafile  # gRPC itself would trust a list of its own
    return grpc.ssl_channel_credentials(_content(ca), _content(url.key), _content(url.cert))


def _content(path: str | None) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
