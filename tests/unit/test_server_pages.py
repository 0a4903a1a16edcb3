"""What a server's pages say of the server itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from millstream.config import Config
from millstream.core.errors import RequestError
from millstream.log.damage import Cause
from millstream.records import codec
from millstream.records.batch import read_header
from millstream.records.record import Record
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import CLUSTER_NAME, AllowAll, Kind, Operation
from millstream.server import Server


async def page(server: Server, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.addresses['http']}{path}", method=method)

    def read() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(read)


@pytest.mark.parametrize(("host", "status"), [("", 421), ("rebound.example", 421), ("pages.test", 200)])
@pytest.mark.parametrize("http_hosts", ["", "pages.test, "])
async def test_a_server_serves_its_pages_under_the_names_that_it_was_given(
    tmp_path: Path, http_hosts: str, host: str, status: int
) -> None:
    config = Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="127.0.0.1:0", http_hosts=http_hosts)
    server = Server(config)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection(*server.addresses["http"])
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        told = int((await asyncio.wait_for(reader.read(), 20)).split()[1])
        writer.close()
    finally:
        await server.stop()
    assert told == (421 if host == "pages.test" and not http_hosts else status)


async def test_the_brokers_of_a_store_are_counted(tmp_path: Path) -> None:
    config = Config(store=f"sqlite:{tmp_path}/app.db", kafka="127.0.0.1:0", http="127.0.0.1:0")
    first, second = Server(config), Server(dataclasses.replace(config, node_id=2))
    await first.start()
    try:
        assert "kafka_brokers 1.0" in (await page(first, "/metrics"))[1]
        await second.start()
        try:
            assert "kafka_brokers 2.0" in (await page(second, "/metrics"))[1]
        finally:
            await second.stop()
    finally:
        await first.stop()


async def test_metadata_that_takes_no_more_changes_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await server.start()

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    try:
        assert (await page(server, "/healthz"))[0] == 200
        monkeypatch.setattr(server.broker._meta, "_write", fail)
        with pytest.raises(RequestError):
            await server.broker.topics.create("orders", 1, {})
        status, body = await page(server, "/healthz")
        assert status == 503 and json.loads(body)["reasons"] == ["the metadata store is read-only: disk I/O error"]
    finally:
        await server.stop()


async def test_what_recovery_had_to_scan_and_to_cut_is_counted(tmp_path: Path) -> None:
    config = Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="127.0.0.1:0")
    server = Server(config)
    await server.start()
    topic = await server.broker.topics.create("orders", 2, {})
    for partition in topic.partitions:
        batch = memoryview(codec.encode([Record(0, 1, None, b"one widget", ())]))
        await partition.log.append(batch, read_header(batch))
    assert "millstream_recovered_logs_total 0.0" in (await page(server, "/metrics"))[1]
    await server.stop()
    [segment] = tmp_path.glob("logs/orders-*/1/*.log")
    with segment.open("ab") as file:
        file.write(b"torn" * 10)
    server = Server(config)
    await server.start()
    try:
        body = (await page(server, "/metrics"))[1]
    finally:
        await server.stop()
    figures = {"recovered_logs": 1, "recovered_bytes": 40, "torn_logs": 1, "torn_bytes": 40}
    for name, value in figures.items():
        assert f"millstream_{name}_total {value:.1f}\n" in body


async def test_a_full_disk_is_told_and_is_no_case_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await server.start()
    try:
        text = (await page(server, "/metrics"))[1]
        figures = dict(line.split() for line in text.splitlines() if line.startswith("millstream_storage_"))
        assert 0 < float(figures["millstream_storage_free_bytes"]) <= float(figures["millstream_storage_size_bytes"])
        assert (await page(server, "/readyz"))[0] == 200
        monkeypatch.setattr(server.broker._logs, "room", lambda: (1 << 30, 4096))
        assert "millstream_storage_free_bytes 4096.0" in (await page(server, "/metrics"))[1]
        status, text = await page(server, "/healthz")
        assert (status, json.loads(text)["status"]) == (200, "degraded")
        assert "4096 of 1073741824 bytes free" in json.loads(text)["reasons"][0]
        status, text = await page(server, "/readyz")
        assert (status, json.loads(text)["status"]) == (503, "read-only")
        assert "the disk is full" in json.loads(text)["reasons"][0]
    finally:
        await server.stop()


class Refusing(AllowAll):
    """Refuses one operation on one kind of resource, or on one resource."""

    is_open = False

    def __init__(self, operation: Operation, kind: Kind, name: str) -> None:
        self.refused = operation, kind, name

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        assert (principal, host) == (ANONYMOUS, "127.0.0.1")
        return (operation, kind, name) != self.refused


async def test_each_page_asks_for_its_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await server.start()
    broker = server.broker
    try:
        topic = await broker.topics.create("orders", 1, {})
        broker.queues.open("workers")
        topic.partitions[0].log.damage.add(0, 5, Cause.CHECKSUM, "a file")
        monkeypatch.setattr(broker._logs, "room", lambda: (1 << 30, 4096))

        broker.authorizer = Refusing(Operation.DESCRIBE, Kind.CLUSTER, CLUSTER_NAME)
        for path in ("/metrics", "/verify"):
            status, body = await page(server, path)
            assert (status, json.loads(body)) == (
                403,
                {"error": "User:ANONYMOUS may not describe cluster kafka-cluster"},
            )
        for path, expected in (("/healthz", (200, "degraded")), ("/readyz", (503, "read-only"))):
            status, body = await page(server, path)
            assert (status, json.loads(body)["status"]) == expected, "a probe needs no right"
            assert "disk" not in body

        broker.authorizer = Refusing(Operation.ALTER, Kind.CLUSTER, CLUSTER_NAME)
        assert (await page(server, "/verify", "POST"))[0] == 403 and broker.verification is None
        assert (await page(server, "/verify"))[0] == 200

        broker.authorizer = Refusing(Operation.DESCRIBE, Kind.GROUP, "workers")
        assert json.loads((await page(server, "/queues"))[1]) == []
        assert len(json.loads((await page(server, "/damage"))[1])) == 1
        broker.authorizer = Refusing(Operation.DESCRIBE, Kind.TOPIC, "orders")
        assert json.loads((await page(server, "/queues"))[1])[0]["group"] == "workers"
        assert json.loads((await page(server, "/damage"))[1]) == []
        assert "orders" not in (await page(server, "/healthz"))[1]

        broker.authorizer = AllowAll()
        assert (await page(server, "/verify?topic=none", "POST"))[0] == 404
        assert (await page(server, "/verify?topic=orders", "POST"))[0] == 202
    finally:
        await server.stop()
