"""What a principal may do: operations on resources, with Kafka's names and numbers (KIP-11).

A `Session` asks its authorizer once per request and resource. `AllowAll` is the authorizer of a broker without
access control.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Protocol

from millstream.core.errors import Code
from millstream.security.principal import Principal

CLUSTER_NAME = "kafka-cluster"
"""The only resource of the kind CLUSTER, as Kafka names it."""


class Operation(IntEnum):
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class Kind(IntEnum):
    """Of a resource."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5

    @property
    def refusal(self) -> Code:
        return _REFUSALS[self]


_REFUSALS = {
    Kind.TOPIC: Code.TOPIC_AUTHORIZATION_FAILED,
    Kind.GROUP: Code.GROUP_AUTHORIZATION_FAILED,
    Kind.CLUSTER: Code.CLUSTER_AUTHORIZATION_FAILED,
    Kind.TRANSACTIONAL_ID: Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_OF_CONFIGS = (Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS)
OPERATIONS = {
    Kind.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        *_OF_CONFIGS,
    ),
    Kind.GROUP: (Operation.READ, Operation.DELETE, Operation.DESCRIBE, *_OF_CONFIGS),
    Kind.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.IDEMPOTENT_WRITE,
        *_OF_CONFIGS,
    ),
}
"""The operations that a kind of resource has, where clients may ask for them (KIP-430)."""


class Authorizer(Protocol):
    is_open: bool
    """Everything is allowed: callers need not ask for each of many resources."""
    changes: int
    """Counts changes of the rules: a caller that caches answers drops them when it differs."""

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool: ...

    def allows_any(self, principal: Principal, host: str, operation: Operation, kind: Kind) -> bool:
        """Whether the principal may do this to any resource of the kind, existing or not (KIP-679)."""

    def scope(self, principal: Principal, host: str) -> Hashable:
        """Equal for clients with equal rights: they may share cached answers."""


class AllowAll:
    is_open = True
    changes = 0

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        return True

    def allows_any(self, principal: Principal, host: str, operation: Operation, kind: Kind) -> bool:
        return True

    def scope(self, principal: Principal, host: str) -> Hashable:
        return None
