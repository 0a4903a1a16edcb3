"""What a command is told about its record."""

from __future__ import annotations

import base64
import json
import uuid

from millstream.cli.record_command import RecordCommand, variables
from millstream.client.share import ACCEPT, REJECT, RELEASE, Delivery
from millstream.records.record import Headers, Record


def delivery(key: bytes | None = None, value: bytes | None = b"", headers: Headers = ()) -> Delivery:
    return Delivery("jobs", 2, Record(7, 1000, key, value, headers), 3, uuid.uuid4())


def test_what_a_variable_cannot_hold_is_given_otherwise() -> None:
    odd = variables(delivery(b"a\0b", headers=(("zero", b"\0"), ("not text", b"\xff"), ("none", None))), "jobs", "g")
    assert b"MILLSTREAM_RECORD_KEY" not in odd and b"MILLSTREAM_RECORD_HEADER_ZERO" not in odd
    assert base64.b64decode(odd[b"MILLSTREAM_RECORD_KEY_BASE64"]) == b"a\0b"
    assert odd[b"MILLSTREAM_RECORD_HEADER_NOT_TEXT"] == b"\xff"
    headers = [["zero", "\0"], ["not text", {"base64": "/w=="}], ["none", None]]
    assert json.loads(odd[b"MILLSTREAM_RECORD_HEADERS"]) == headers


def test_a_record_without_a_key_sets_no_variable_for_it() -> None:
    plain = variables(delivery(), "jobs", "g")
    assert b"MILLSTREAM_RECORD_KEY" not in plain and plain[b"MILLSTREAM_RECORD_ATTEMPT"] == b"3"


def run(*command: str, value: bytes | None = b"") -> int:
    return RecordCommand(command, delivery(value=value), "jobs", "g").run(None).verb


def test_exit_codes_are_answers() -> None:
    assert run("sh", "-c", "exit 0") == ACCEPT
    assert run("sh", "-c", "exit 1") == run("sh", "-c", "exit 99") == run("sh", "-c", "kill -9 $$") == RELEASE
    assert run("sh", "-c", "exit 2") == REJECT
    assert run("/nowhere/to/be/found") == RELEASE


def test_how_a_command_ended_is_the_reason_of_its_answer() -> None:
    def reason(*command: str, seconds: float | None = None) -> str:
        return RecordCommand(command, delivery(), "jobs", "g").run(seconds).reason

    assert reason("true") == ""
    assert reason("sh", "-c", "exit 2") == "rejected by sh (exit code 2)"
    assert reason("sh", "-c", "kill -9 $$") == "released by sh (signal 9)"
    assert reason("sleep", "60", seconds=0.1) == "released: sleep took longer than 0.1 s"
    assert reason("/nowhere/to/be/found").startswith("released: /nowhere/to/be/found cannot be run")


def test_a_command_need_not_read_its_value() -> None:
    assert run("true", value=bytes(1 << 20)) == ACCEPT
    assert run("sh", "-c", "[ $(wc -c) = 0 ]", value=None) == ACCEPT
