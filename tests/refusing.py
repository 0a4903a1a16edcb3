"""A throw-away authorizer: it proves that doors and sessions ask one."""

from __future__ import annotations

from collections.abc import Hashable

from millstream.security.principal import Principal
from millstream.security.rights import Kind, Operation


class Refusing:
    """Refuses the operations that a test denies, and allows all others."""

    is_open = False

    def __init__(self) -> None:
        self.changes = 0
        self.denied: set[tuple[Operation, Kind, str]] = set()

    def deny(self, operation: Operation, kind: Kind, name: str) -> None:
        self.denied.add((operation, kind, name))
        self.changes += 1

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        return (operation, kind, name) not in self.denied

    def allows_any(self, principal: Principal, host: str, operation: Operation, kind: Kind) -> bool:
        return True

    def scope(self, principal: Principal, host: str) -> Hashable:
        return principal
