"""`millstream queue consume`: runs a command per record, many at a time.

Records are leased only for free slots (`--jobs`), and each lease is renewed while its command runs: other records are
available to other workers, and a command may take hours. If the connection breaks, commands go on; their leases are
lost, so their records are delivered again (at least once).

SIGTERM and Ctrl-C: nothing new is leased, running commands end and are acknowledged, then the member leaves. A second
signal stops the commands. SIGTERM ends with 0, Ctrl-C with 130.
"""

from __future__ import annotations

import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.admin.failure import Failure, refused
from millstream.admin.queues import Begin, ensure
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.moment import duration_ms

if TYPE_CHECKING:
    from millstream.cli.record_command import RecordCommand
    from millstream.client.share import Lease, Reply, ShareMember

JOBS_MAX = 1000
BUSY_WAIT_MS = 100
"""Of a fetch while commands run: acknowledgements wait for it."""
IDLE_WAIT_MS = 500
RECONNECT_SECONDS = 1.0


def consume(
    topic: Annotated[str, typer.Argument(show_default=False)],
    command: Annotated[list[str], typer.Argument(help="After --: the command for each record.", show_default=False)],
    group: Annotated[str, typer.Option("--group", "-g", help="The queue to work on.", show_default=False)],
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, max=JOBS_MAX, help="How many commands run at a time.")
    ] = 1,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Exit after this many records.")] = None,
    until_end: Annotated[bool, typer.Option("--until-end", "-e", help="Exit when nothing is available.")] = False,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop a command that takes longer; its record is released.")
    ] = None,
    from_: Annotated[Begin, typer.Option("--from", help="Where the queue starts if it is new.")] = Begin.START,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Run a command for each record: its value on standard input, the rest in MILLSTREAM_RECORD_... variables.

    Exit code 0 accepts the record, 1 releases it (to be tried again), 2 rejects it (to the dead letters), anything
    else releases it.
    """
    timeout_seconds = None if timeout is None else duration_ms(timeout, "--timeout") / 1000
    if shutil.which(command[0]) is None:
        raise Failure(f"there is no command {command[0]} to run")
    connection = Connection(broker)
    connection.topic(topic)
    ensure(connection, group, from_)
    work = Work(connection, topic, group, command, jobs, count, until_end, timeout_seconds)
    with Signals(work) as signals:
        work.run()
    print(work.summary(), file=sys.stderr)
    if signals.is_interrupted:
        raise KeyboardInterrupt


@dataclass(slots=True)
class Work:
    connection: Connection
    topic: str
    group: str
    command: list[str]
    jobs: int
    left: int | None
    until_end: bool
    timeout_seconds: float | None
    is_stopping: bool = False
    running: set[RecordCommand] = field(default_factory=set)
    tally: Counter[str] = field(default_factory=Counter)
    _finished: queue.SimpleQueue[tuple[RecordCommand, Reply]] = field(default_factory=queue.SimpleQueue)
    _unconfirmed: dict[Lease, Reply] = field(default_factory=dict)
    """Acknowledgements in flight to the broker."""
    _member: ShareMember | None = None
    _member_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _renewed_at: float = 0.0

    def run(self) -> None:
        from millstream.client.link import LinkBroken
        from millstream.client.share import ShareError

        try:
            while not self._is_over():
                try:
                    self._turn(self._open())
                except LinkBroken:
                    self._lose()
            if self._member is not None:
                self._member.leave()
        except LinkBroken:  # the broker detects the lost connection
            return
        except ShareError as error:
            self.stop_commands()
            raise refused(error, self.group) from error

    def stop_commands(self) -> None:
        for each in list(self.running):
            each.stop()

    def summary(self) -> str:
        words = ("accepted", "released", "rejected", "too late")
        parts = [f"{self.tally[word]:,} {word}" for word in words if self.tally[word] or word == "accepted"]
        count = sum(self.tally.values())
        return f"{count:,} record{'s' * (count != 1)}: {', '.join(parts)}"

    def _is_over(self) -> bool:
        is_enough = self.is_stopping or self.left == 0
        return is_enough and not self.running and self._finished.empty()

    def _open(self) -> ShareMember:
        if self._member is None:
            from millstream.client.link import LinkBroken
            from millstream.client.share import ShareMember

            try:
                self._member = ShareMember(
                    self.connection.coordinator_link(self.group), self.group, [self.topic], self._member_id
                )
            except Failure as error:
                raise LinkBroken(str(error)) from error
        return self._member

    def _turn(self, member: ShareMember) -> None:
        """One round: renews leases, acknowledges finished records, leases new ones."""
        from millstream.client.share import PartitionRefused

        member.beat()
        self._renew(member)
        answers = self._unconfirmed = self._answers()
        room = self.jobs - len(self.running)
        if self.left is not None:
            room = min(room, self.left)
        wait_ms = self._wait_ms(member)
        if room <= 0 or self.is_stopping:
            self._settle(answers, member.answer(answers))
            self._wait_for_one(wait_ms / 1000)
            return
        try:
            taken, late = member.fetch(room, wait_ms, answers)
        except PartitionRefused:
            if not self.running:
                raise
            self._wait_for_one(wait_ms / 1000)  # running commands keep their records of other partitions
            return
        self._settle(answers, late)
        for delivery in taken:
            self._start(delivery)
        if self.until_end and not (taken or answers or self.running):
            self.is_stopping = True

    def _wait_ms(self, member: ShareMember) -> int:
        wait_ms = BUSY_WAIT_MS if self.running or self.until_end else IDLE_WAIT_MS
        return min(wait_ms, member.lease_ms // 4)

    def _renew(self, member: ShareMember) -> None:
        now = time.monotonic()
        if now - self._renewed_at < member.lease_ms / 3000:
            return
        self._renewed_at = now
        leased = {each.delivery.lease: each for each in self.running if each.has_lease}
        if leased:
            for lease in member.renew(list(leased)):
                leased[lease].has_lease = False

    def _start(self, delivery: Any) -> None:
        from millstream.cli.record_command import RecordCommand

        command = RecordCommand(self.command, delivery, self.topic, self.group)
        self.running.add(command)
        if self.left is not None:
            self.left -= 1
        threading.Thread(target=self._run, args=(command,), daemon=True).start()

    def _run(self, command: RecordCommand) -> None:
        self._finished.put((command, command.run(self.timeout_seconds)))

    def _answers(self) -> dict[Lease, Reply]:
        answers = {}
        while not self._finished.empty():
            command, reply = self._finished.get()
            self.running.discard(command)
            if command.has_lease:
                answers[command.delivery.lease] = reply
            else:
                self._too_late(command.delivery.lease)
        return answers

    def _settle(self, answers: dict[Lease, Reply], late: list[Lease]) -> None:
        from millstream.client.share import ACCEPT, REJECT

        self._unconfirmed = {}
        for lease, (verb, _, _) in answers.items():
            if lease in late:
                self._too_late(lease)
            else:
                self.tally["accepted" if verb == ACCEPT else "rejected" if verb == REJECT else "released"] += 1

    def _too_late(self, lease: Lease) -> None:
        self.tally["too late"] += 1
        where = f"{lease.topic} partition {lease.partition} offset {lease.offset}"
        print(f"millstream: {where}: lost the lease, so the record may be delivered again", file=sys.stderr)

    def _wait_for_one(self, seconds: float) -> None:
        try:
            self._finished.put(self._finished.get(timeout=seconds))
        except queue.Empty:
            return

    def _lose(self) -> None:
        """After a broken connection: running commands lose their leases."""
        if self._member is not None:
            print(f"millstream: lost the broker at {self.connection.address}; reconnecting", file=sys.stderr)
        self._member = None
        for each in self.running:
            each.has_lease = False
        for lease in [*self._unconfirmed, *self._answers()]:
            self._too_late(lease)
        self._unconfirmed = {}
        time.sleep(RECONNECT_SECONDS)


class Signals:
    """Handles SIGTERM and Ctrl-C during the work."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._old: dict[int, Any] = {}
        self.is_interrupted = False

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.is_interrupted = self.is_interrupted or number == signal.SIGINT
        if self._work.is_stopping:
            self._work.stop_commands()
        self._work.is_stopping = True
