"""The verbs of a session about the broker as a whole: failures, damage, verification, queues. The pages show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from millstream.broker.groups.queue.report import report
from millstream.broker.verification import Verification
from millstream.log.damage import DamagedRange
from millstream.security.rights import CLUSTER_NAME, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.session import Session


class Health:
    __slots__ = ("_broker", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broker = session._broker

    def check_cluster(self, operation: Operation) -> None:
        self._session.check(operation, Kind.CLUSTER, CLUSTER_NAME)

    def failures(self) -> list[str]:
        return self._told(self._broker.failures())

    def shortages(self) -> list[str]:
        return self._told(self._broker.shortages())

    def _told(self, reasons: Iterable[str]) -> list[str]:
        """Reasons name topics and files. Anyone may learn that there are some: a probe has no credentials."""
        found = list(reasons)
        if not found or self._session.allows(Operation.DESCRIBE, Kind.CLUSTER, CLUSTER_NAME):
            return found
        return [f"{self._session.principal} may not see the reason"]

    def damage(self) -> list[tuple[str, int, DamagedRange]]:
        """The damage in topics that the principal may describe: topic, partition and range of offsets."""
        found = list(self._broker.damage())
        may = {name: self._session.allows(Operation.DESCRIBE, Kind.TOPIC, name) for name, _, _ in found}
        return [each for each in found if may[each[0]]]

    def queue_reports(self) -> list[dict[str, Any]]:
        names = [
            name for name in self._broker.queues.names() if self._session.allows(Operation.DESCRIBE, Kind.GROUP, name)
        ]
        return [report(queue) for queue in map(self._broker.queues.get, names) if queue is not None]

    def verification(self) -> Verification | None:
        """The last one, with its progress."""
        self.check_cluster(Operation.DESCRIBE)
        return self._broker.verification

    def verify(self, name: str | None) -> tuple[Verification, bool]:
        """Starts a verification of all topics, or of one; returns it, or the running one and False."""
        self.check_cluster(Operation.ALTER)
        last = self._broker.verification
        if last is not None and not last.is_over:
            return last, False
        topics = self._broker.topics if name is None else [self._session.topic(name, Operation.DESCRIBE)]
        return self._broker.verify(topics), True
