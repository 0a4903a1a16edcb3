"""Metadata in etcd: transactions that share a request, limits, housekeeping, and endpoints that are not usable."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aetcd import rpc

from millstream.core.clock import SystemClock
from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError
from millstream.stores import etcd_compaction, etcd_connection
from millstream.stores.base import Check, Delete, Operation, Put, Versioned
from millstream.stores.etcd import EtcdMeta
from millstream.stores.etcd_compaction import Compaction
from millstream.stores.etcd_connection import EtcdConnection, Unreachable
from millstream.stores.etcd_transactions import CONDITIONS_MAX, TRANSACTIONS_MAX, Transaction, batches
from millstream.testing.clock import VirtualClock, VirtualTimer
from tests.etcd import PrivateEtcd
from tests.etcd import etcd as etcd

SECONDS = 20.0


@pytest.fixture
async def meta(etcd: PrivateEtcd) -> AsyncIterator[EtcdMeta]:
    opened = EtcdMeta(etcd.new_prefix(), VirtualClock())
    await opened.start()
    yield opened
    await opened.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that any connection makes."""
    names: list[str] = []
    call = EtcdConnection.call

    async def count(self: EtcdConnection, name: str, request: Any) -> Any:
        names.append(name)
        return await call(self, name, request)

    monkeypatch.setattr(EtcdConnection, "call", count)
    return names


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every housekeeping round compacts."""
    for name in ("KEEP_REVISIONS", "COMPACT_REVISIONS"):
        monkeypatch.setattr(etcd_compaction, name, 1)


class TestTransactions:
    async def test_concurrent_ones_share_a_request_and_its_revision(self, meta: EtcdMeta, sent: list[str]) -> None:
        revisions = await asyncio.gather(*(meta.transact(Put(f"k/{at}", b"")) for at in range(TRANSACTIONS_MAX)))
        assert sent == ["Txn"] and len(set(revisions)) == 1

    async def test_a_conflict_of_one_does_not_affect_the_others_of_its_request(
        self, meta: EtcdMeta, sent: list[str]
    ) -> None:
        revision = await meta.transact(Put("b", b"before"))
        sent.clear()
        outcomes = await asyncio.gather(
            meta.transact(Put("a", b"1", if_revision=0), Check("b", revision)),
            meta.transact(Put("b", b"2", if_revision=revision + 7), Put("c", b"2")),
            meta.transact(Put("d", b"3"), Check("nothing", 0)),
            return_exceptions=True,
        )
        assert sent == ["Txn"]
        assert isinstance(outcomes[1], RevisionConflict)
        assert str(outcomes[1]) == f"b is at revision {revision}, not {revision + 7}"
        assert [(key, value.value) for key, value in await meta.list("")] == [
            ("a", b"1"),
            ("b", b"before"),
            ("d", b"3"),
        ]

    async def test_one_that_depends_on_an_earlier_one_waits_for_its_request(
        self, meta: EtcdMeta, sent: list[str]
    ) -> None:
        """etcd would evaluate its condition before the earlier change."""
        outcomes = await asyncio.gather(
            meta.transact(Put("lease", b"")),
            meta.transact(Put("a", b""), Check("lease", 0)),
            meta.transact(Put("b", b"")),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], int) and isinstance(outcomes[2], int) and outcomes[2] > outcomes[0]
        assert isinstance(outcomes[1], RevisionConflict)
        assert sent == ["Txn", "Txn"]

    async def test_the_first_failed_condition_is_reported(self, meta: EtcdMeta) -> None:
        await meta.transact(Put("a", b""), Put("b", b""))
        with pytest.raises(RevisionConflict) as caught:
            await meta.transact(Check("none", 0), Put("b", b"", if_revision=0), Put("a", b"", if_revision=0))
        assert caught.value.key == "b"

    async def test_the_last_change_of_a_key_wins(self, meta: EtcdMeta) -> None:
        revision = await meta.transact(Put("a", b"1"), Delete("a"), Put("a", b"2"), Put("b", b""), Delete("b"))
        assert await meta.list("") == [("a", Versioned(b"2", revision))]

    @pytest.mark.parametrize("count", [127, 128, 1_001, 5_000])
    async def test_one_of_many_changes_is_atomic(self, meta: EtcdMeta, sent: list[str], count: int) -> None:
        """etcd takes 128 operations a request, side by side."""
        lease = await meta.transact(Put("lease", b""))
        sent.clear()
        revision = await meta.transact(*(Put(f"k/{at:05}", b"%d" % at) for at in range(count)), Check("lease", lease))
        assert sent == ["Txn"]
        found = await meta.list("k/")
        assert [(key, value) for key, value in found] == [
            (f"k/{at:05}", Versioned(b"%d" % at, revision)) for at in range(count)
        ]
        with pytest.raises(RevisionConflict):
            await meta.transact(*(Delete(f"k/{at:05}") for at in range(count)), Check("lease", lease + 1))
        assert len(await meta.list("k/")) == count
        await meta.transact(*(Delete(f"k/{at:05}") for at in range(count)), Check("lease", lease))
        assert not await meta.list("k/")

    async def test_one_of_many_changes_beside_others_shares_their_request(
        self, meta: EtcdMeta, sent: list[str]
    ) -> None:
        many = [Put(f"many/{at}", b"") for at in range(1_000)]
        await asyncio.gather(
            meta.transact(Put("a", b"")), meta.transact(*many, Check("none", 0)), meta.transact(Put("b", b""))
        )
        assert sent == ["Txn"]
        assert len(await meta.list("")) == 1_002

    async def test_conditions_have_a_limit(self, meta: EtcdMeta) -> None:
        await meta.transact(*(Put(f"k/{at}", b"", if_revision=0) for at in range(CONDITIONS_MAX)))
        beside = meta.transact(Put("beside", b""))
        with pytest.raises(RequestError, match="has 128 conditions; etcd takes at most 127") as caught:
            await meta.transact(*(Put(f"l/{at}", b"", if_revision=0) for at in range(CONDITIONS_MAX + 1)))
        assert caught.value.code is Code.INVALID_REQUEST
        assert await beside and not await meta.list("l/")

    async def test_one_above_the_size_of_a_request_fails_alone(self, meta: EtcdMeta) -> None:
        outcomes = await asyncio.gather(
            meta.transact(Put("a", b"")),
            meta.transact(Put("large", bytes(3 << 20))),
            meta.transact(Put("b", b"")),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], RequestError) and "--max-request-bytes" in outcomes[1].detail
        assert [key for key, _ in await meta.list("")] == ["a", "b"]

    async def test_large_values_are_divided_into_requests(self, meta: EtcdMeta) -> None:
        await asyncio.gather(*(meta.transact(Put(f"k/{at}", bytes(300_000))) for at in range(12)))
        assert [len(value.value) for _, value in await meta.list("k/")] == [300_000] * 12

    async def test_a_request_that_etcd_executes_late_changes_nothing(
        self, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its client gave it up, and has written since."""
        call, delayed = meta._connection.call, []

        async def delay(name: str, request: Any) -> Any:
            delayed.append((name, request))
            raise Unreachable(meta.location)

        for _ in range(2):
            await meta.transact(Put("a", b"before"))
            monkeypatch.setattr(meta._connection, "call", delay)
            with pytest.raises(RequestError, match="cannot be reached"):
                await meta.transact(Put("a", b"late"), Put("b", b"late"))
            monkeypatch.setattr(meta._connection, "call", call)
            revision = await meta.transact(Put("a", b"after"))
            assert not (await call(*delayed.pop())).succeeded
            assert await meta.list("") == [("a", Versioned(b"after", revision))]

    async def test_a_fence_that_changes_late_costs_one_more_request(self, meta: EtcdMeta, sent: list[str]) -> None:
        meta._in_doubt = True
        await meta.transact(Put("a", b""))
        await meta._connection.call("Put", rpc.PutRequest(key=meta._fence))
        sent.clear()
        await meta.transact(Put("a", b""))
        assert sent == ["Txn", "Put", "Txn"]

    async def test_a_list_of_several_pages_is_of_one_revision(
        self, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(etcd_connection, "PAGE_KEYS", 10)
        await meta.transact(*(Put(f"k/{at:02}", b"old") for at in range(35)))
        call, pages = meta._connection.call, 0

        async def change_meanwhile(name: str, request: Any) -> Any:
            nonlocal pages
            pages += name == "Range"
            if name == "Range" and pages == 2:
                await meta.transact(*(Put(f"k/{at:02}", b"new") for at in range(35)))
            return await call(name, request)

        monkeypatch.setattr(meta._connection, "call", change_meanwhile)
        found = await meta.list("k/")
        assert len(found) == 35 and {value.value for _, value in found} == {b"old"} and pages == 4

    def test_batches_keep_the_order_and_never_write_a_key_twice(self) -> None:
        def each(*operations: Operation) -> Transaction[int]:
            return Transaction(operations, "/p/", 0)

        puts = [each(Put(f"k/{at}", b"")) for at in range(100)]
        assert [len(batch) for batch in batches(puts)] == [64, 36]
        same = [each(Put("a", b"")) for _ in range(3)]
        assert [len(batch) for batch in batches(same)] == [1, 1, 1]
        checked_then_written = [each(Put("a", b""), Check("lease", 1)), each(Put("lease", b""))]
        assert [len(batch) for batch in batches(checked_then_written)] == [2]
        assert [len(batch) for batch in batches(reversed(checked_then_written))] == [1, 1]


class TestCompaction:
    def test_revisions_are_kept_for_some_minutes(self) -> None:
        clock = VirtualClock()
        compaction = Compaction(clock)
        assert compaction.choose(5_000) is None
        clock.advance(etcd_compaction.KEEP_SECONDS - 1)
        assert compaction.choose(7_000) is None
        clock.advance(1)
        assert compaction.choose(9_000) == 5_000
        assert compaction.choose(9_001) is None, "nothing more is old enough"
        clock.advance(etcd_compaction.KEEP_SECONDS)
        assert compaction.choose(9_500) == 9_001
        clock.advance(etcd_compaction.KEEP_SECONDS)
        assert compaction.choose(9_700) is None, "too few to be worth it"

    def test_no_more_than_so_many_revisions_are_kept(self) -> None:
        compaction = Compaction(VirtualClock())
        assert compaction.choose(100_000) == 100_000 - etcd_compaction.KEEP_REVISIONS

    def test_no_more_than_so_many_bytes_are_kept(self) -> None:
        """Large revisions: few of them fill etcd."""
        compaction = Compaction(VirtualClock())
        chosen = [(at, compaction.choose(at)) for at in range(1, 201) if compaction.wrote(1 << 20)]
        step, keep = etcd_compaction.COMPACT_BYTES >> 20, etcd_compaction.KEEP_BYTES >> 20
        assert [at for at, _ in chosen] == list(range(step, 201, step))
        assert chosen[-1] == (192, 192 - keep) and chosen[0][1] is None


class TestHousekeeping:
    async def test_tens_of_thousands_of_commits_leave_little(
        self, etcd: PrivateEtcd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(etcd_compaction, "KEEP_BYTES", 2 << 20)
        monkeypatch.setattr(etcd_compaction, "COMPACT_BYTES", 1 << 20)
        meta = EtcdMeta(etcd.new_prefix(), VirtualClock())
        await meta.start()
        before, value = etcd.bytes_in_use(), bytes(200)
        for _ in range(300):
            await asyncio.gather(*(meta.transact(Put(f"k/{number}", value)) for number in range(128)))
        await meta.housekeep()
        async with asyncio.timeout(SECONDS):
            while etcd.bytes_in_use() - before > 5 << 20:  # etcd compacts in the background; 38,400 puts are 12 MB
                await meta.transact(Put("tick", b""))
        assert len(await meta.list("k/")) == 128
        await meta.close()

    async def test_brokers_that_compact_the_same_revision_do_not_disturb_each_other(
        self, etcd: PrivateEtcd, eager: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        prefix = etcd.new_prefix()
        metas = [EtcdMeta(prefix, VirtualClock()) for _ in range(3)]
        for meta in metas:
            await meta.start()
        await metas[0].transact(Put("a", b"1"))
        await metas[0].transact(Put("a", b"2"))
        await asyncio.gather(*(meta.housekeep() for meta in metas))
        await metas[1].transact(Put("a", b"3"))
        assert not caplog.records
        for meta in metas:
            await meta.close()

    async def test_compaction_can_be_left_to_etcd(self, etcd: PrivateEtcd, sent: list[str]) -> None:
        meta = EtcdMeta(etcd.new_prefix() + "?compaction=off", VirtualClock())
        await meta.start()
        sent.clear()
        await meta.housekeep()
        assert sent == []
        await meta.close()

    async def test_a_full_etcd_says_what_to_do_and_accepts_writes_again(self) -> None:
        with PrivateEtcd(quota_backend_bytes=str(1 << 20)) as small:
            meta = EtcdMeta(small.new_prefix(), VirtualClock())
            await meta.start()
            await meta.transact(Put("kept", b"1"))
            with pytest.raises(RequestError, match="compact and defragment etcd, then disarm its alarm") as caught:
                async with asyncio.timeout(SECONDS):
                    while True:
                        await meta.transact(Put("large", bytes(200_000)))
            assert caught.value.code.retriable and meta.failure is None
            with pytest.raises(RequestError, match="disarm its alarm"):
                await asyncio.gather(meta.transact(Put("small", b"")), meta.transact(Delete("none")))
            await meta.transact(Delete("large"))
            assert (await meta.get("kept")) is not None
            small.post("kv/compaction", revision=str(await meta._connection.revision()), physical=True)
            small.post("maintenance/defragment")
            member = small.post("maintenance/status")["header"]["member_id"]
            small.post("maintenance/alarm", action="DEACTIVATE", alarm="NOSPACE", memberID=member)
            await meta.transact(Put("kept", b"2"))
            await meta.close()


async def refusal(url: str) -> str:
    """What is said when metadata cannot be opened; within about five seconds on an idle machine."""
    meta = EtcdMeta(url, SystemClock())
    try:
        async with asyncio.timeout(8.0):
            with pytest.raises(StartupError) as caught:
                await meta.start()
    finally:
        await meta.close()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and "hunter2" not in text
    return text


@contextlib.asynccontextmanager
async def server(first: bytes | None) -> AsyncIterator[int]:
    """Accepts connections, sends some bytes when it was spoken to, and hangs up; None: it stays silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        if first is None:
            await asyncio.sleep(30)
        writer.write(first or b"")
        writer.close()

    serving = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield serving.sockets[0].getsockname()[1]
    finally:
        serving.close()


class TestEndpoints:
    async def test_no_server_at_any_endpoint(self) -> None:
        text = await refusal("etcd://me:hunter2@127.0.0.1:1,127.0.0.1:2/app")
        assert text.startswith("etcd://127.0.0.1:1,127.0.0.1:2/app cannot be used: 127.0.0.1:1 cannot be reached (")
        assert text.endswith("): start etcd, or correct the address") and "; 127.0.0.1:2 cannot be" in text

    async def test_a_port_that_accepts_and_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            text = await refusal(f"etcd://127.0.0.1:{port}")
        assert f"127.0.0.1:{port} does not answer: check the address" in text

    @pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n", b""])
    async def test_not_etcd(self, greeting: bytes) -> None:
        async with server(greeting) as port:
            assert f"127.0.0.1:{port} is not etcd: correct the address" in await refusal(f"etcd://127.0.0.1:{port}")

    async def test_an_endpoint_that_does_not_answer_costs_a_moment(self, etcd: PrivateEtcd) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = etcd.new_prefix().replace("etcd://", f"etcd://127.0.0.1:1,127.0.0.1:{silent.getsockname()[1]},")
            meta = EtcdMeta(url, SystemClock())
            async with asyncio.timeout(5.0):
                await meta.start()
                await meta.transact(Put("a", b""))
            await meta.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[PrivateEtcd]:
    with PrivateEtcd() as server:
        server.check_passwords("mill", "s3cret/wörd", "/app/")
        yield server


class TestSecurity:
    def url(self, server: PrivateEtcd, user: str, prefix: str = "app") -> str:
        return f"etcd://{user}@{server.address}/{prefix}"

    async def test_a_user_with_rights_on_the_prefix_reads_writes_watches_and_compacts(
        self, guarded: PrivateEtcd, eager: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        meta = EtcdMeta(self.url(guarded, "mill:s3cret%2Fw%C3%B6rd"), SystemClock())
        await meta.start()
        seen: list[str] = []
        meta.watch("", lambda key, value: seen.append(key))
        await asyncio.gather(*(meta.transact(Put(key, b"")) for key in ("a", "b")))
        await meta.transact(Put("a", b"2"))
        await meta.housekeep()
        assert seen == ["a", "b", "a"] and not caplog.records
        member = await meta._connection.member()
        member.metadata = (("token", "expired.1"),)
        assert await meta.get("a") is not None
        await meta.close()

    async def test_a_wrong_password(self, guarded: PrivateEtcd) -> None:
        assert "etcd refuses the user or the password" in await refusal(self.url(guarded, "mill:hunter2"))

    async def test_no_password(self, guarded: PrivateEtcd) -> None:
        text = await refusal(f"etcd://{guarded.address}/app")
        assert "etcd asks for a user and a password: write etcd://USER:PASSWORD@" in text

    @pytest.mark.parametrize(("user", "prefix"), [("guest:guest", "app"), ("mill:s3cret%2Fw%C3%B6rd", "other")])
    async def test_a_user_without_rights(self, guarded: PrivateEtcd, user: str, prefix: str) -> None:
        text = await refusal(self.url(guarded, user, prefix))
        assert f"has no permission on keys under /{prefix}/" in text and f"--prefix=true /{prefix}/" in text

    async def test_a_password_for_an_etcd_that_checks_none_is_logged(
        self, etcd: PrivateEtcd, caplog: pytest.LogCaptureFixture
    ) -> None:
        meta = EtcdMeta(etcd.new_prefix().replace("etcd://", "etcd://me:hunter2@"), SystemClock())
        await meta.start()
        await meta.transact(Put("a", b""))
        await meta.close()
        assert "its authentication is off" in caplog.text and "hunter2" not in caplog.text


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(home / "ca.pem")
    trustme.CA().cert_pem.write_to_path(home / "other.pem")
    for name, subject in (("server", "127.0.0.1"), ("client", "client@example.org")):
        issued = authority.issue_cert(subject)
        issued.private_key_pem.write_to_path(home / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(home / f"{name}.pem")
    return home


@pytest.fixture(scope="module")
def secured(files: Path) -> Iterator[PrivateEtcd]:
    """It wants a client certificate."""
    settings = {
        "cert_file": f"{files}/server.pem",
        "key_file": f"{files}/server.key",
        "trusted_ca_file": f"{files}/ca.pem",
        "client_cert_auth": "true",
    }
    with PrivateEtcd(scheme="https", **settings) as server:
        yield server


class TestTls:
    def url(self, secured: PrivateEtcd, options: str, scheme: str = "etcds") -> str:
        return f"{scheme}://{secured.address}/app{options}"

    async def test_an_authority_and_a_client_certificate_connect(self, secured: PrivateEtcd, files: Path) -> None:
        options = f"?ca={files}/ca.pem&cert={files}/client.pem&key={files}/client.key"
        meta = EtcdMeta(self.url(secured, options), SystemClock())
        await meta.start()
        meta.watch("a", lambda key, value: None)
        await meta.transact(Put("a", b""))
        await meta.close()

    async def test_what_does_not_match_is_named(self, secured: PrivateEtcd, files: Path, etcd: PrivateEtcd) -> None:
        certificate = f"&cert={files}/client.pem&key={files}/client.key"
        trusted = f"?ca={files}/ca.pem"
        assert "speaks TLS: write etcds://" in await refusal(self.url(secured, "", "etcd"))
        assert "a certificate that is not trusted (" in await refusal(
            self.url(secured, f"?ca={files}/other.pem" + certificate)
        )
        assert "asks for a client certificate: name one with" in await refusal(self.url(secured, trusted))
        assert "does not speak TLS: write etcd://" in await refusal(self.url(etcd, trusted))


class HeldClock(VirtualClock):
    """Sets an event whenever a timer is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> VirtualTimer:
        self.asked.set()
        return super().call_later(seconds, callback)


class TestWatch:
    async def test_a_change_is_reported_before_its_transaction_is_answered(self, meta: EtcdMeta) -> None:
        seen: list[str] = []
        meta.watch("t/", lambda key, value: seen.append(key))
        for at in range(50):
            await meta.transact(Put(f"t/{at}", b""), Put(f"u/{at}", b""))
            assert seen[-1] == f"t/{at}" and len(seen) == at + 1

    async def test_a_transaction_that_changes_nothing_waits_for_no_report(self, meta: EtcdMeta) -> None:
        meta.watch("t/", lambda key, value: None)
        await meta.transact(Put("t/a", b""))
        async with asyncio.timeout(2.0):
            await meta.transact(Delete("t/none"))
            await meta.transact(Check("t/none", 0))
            await meta.transact()
            with pytest.raises(RevisionConflict):
                await meta.transact(Put("t/a", b"", if_revision=0))

    async def test_an_unwatched_key_waits_for_no_report(self, meta: EtcdMeta) -> None:
        meta.watch("t/", lambda key, value: None)
        assert meta._watch._task is not None
        meta._watch._task.cancel()
        async with asyncio.timeout(2.0):
            await meta.transact(Put("u/a", b""))

    async def test_a_compaction_while_the_watch_is_away_reports_the_differences(self, etcd: PrivateEtcd) -> None:
        prefix = etcd.new_prefix()
        clock = HeldClock()
        watching, other = EtcdMeta(prefix, clock), EtcdMeta(prefix, SystemClock())
        await watching.start()
        await other.start()
        await other.transact(Put("t/kept", b"1"), Put("t/changed", b"1"), Put("t/gone", b"1"), Put("u/x", b"1"))
        seen: list[tuple[str, bytes | None]] = []
        last = asyncio.Event()

        def hear(key: str, value: Versioned | None) -> None:
            seen.append((key, None if value is None else value.value))
            if key == "t/last":
                last.set()

        watching.watch("t/", hear)
        assert len(await watching.list("t/")) == 3
        await reported(watching, other)
        seen.clear()
        watching._connection.drop(await watching._connection.member())
        async with asyncio.timeout(SECONDS):
            await clock.asked.wait()  # the watch is lost, and waits to resume
        await other.transact(Put("t/changed", b"2"), Delete("t/gone"), Put("u/x", b"2"))
        await other.transact(Put("t/passing", b"1"))
        await other.transact(Delete("t/passing"))
        await other.transact(Put("t/last", b"1"))
        revision = await other._connection.revision()
        etcd.post("kv/compaction", revision=str(revision))
        clock.advance(etcd_connection.RETRY_SECONDS)
        async with asyncio.timeout(SECONDS):
            await last.wait()
        assert seen == [("t/gone", None), ("t/changed", b"2"), ("t/last", b"1")]
        await other.transact(Put("t/kept", b"2"))
        await reported(watching, other)
        assert seen[3] == ("t/kept", b"2"), "and goes on"
        await watching.close()
        await other.close()

    async def test_a_server_that_ends_the_watch_costs_no_change(self, etcd: PrivateEtcd) -> None:
        meta = EtcdMeta(etcd.new_prefix(), SystemClock())
        await meta.start()
        seen: list[str] = []
        meta.watch("", lambda key, value: seen.append(key))
        for at in range(5):
            meta._connection.drop(await meta._connection.member())
            await meta.transact(Put(str(at), b""))
        assert seen == ["0", "1", "2", "3", "4"]
        await meta.close()


async def reported(watching: EtcdMeta, other: EtcdMeta) -> None:
    """Returns when all changes so far are reported."""
    await watching._watch.reached(await other.transact(Put("mark", b"")))
