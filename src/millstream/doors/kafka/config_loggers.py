"""The broker's loggers as a config resource (KIP-412): one entry per logger, with its level as the value.

Levels have log4j's names, as tools expect. A change lasts until the broker stops, as in Kafka.
"""

from __future__ import annotations

import logging

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.config_entries import FROM_LOGGER, Synonym, entry
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

ROOT = "root"
SET, DELETE = 0, 1
LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40, "FATAL": 50}
_UNKNOWN_TYPE = 0


def describe(name: str, context: Context) -> list[Fields]:
    context.session.configs.check_logger(Operation.DESCRIBE_CONFIGS, name)
    entries = []
    for logger in (ROOT, *sorted(_loggers())):
        level = _level_name(_logger(logger).getEffectiveLevel())
        entries.append({**entry(logger, [Synonym(logger, level, FROM_LOGGER)], _UNKNOWN_TYPE, None), "synonyms": []})
    return entries


def alter(resource: Message, validate_only: bool, context: Context) -> None:
    """Atomic: if one level is invalid, no level changes."""
    context.session.configs.check_logger(Operation.ALTER_CONFIGS, resource.resource_name)
    levels = [(_logger(config.name), _level(config)) for config in resource.configs]
    if not validate_only:
        for logger, level in levels:
            logger.setLevel(level)


def _level(config: Message) -> int:
    if config.config_operation == DELETE:
        if config.name == ROOT:
            raise RequestError(Code.INVALID_REQUEST, "the root logger needs a level")
        return logging.NOTSET
    if config.config_operation != SET:
        raise RequestError(Code.INVALID_REQUEST, "a logger's level can be set and deleted, not appended to")
    if config.value not in LEVELS:
        levels = ", ".join(LEVELS)
        raise RequestError(Code.INVALID_CONFIG, f"{config.name}={config.value} is not valid: must be one of {levels}")
    return LEVELS[config.value]


def _loggers() -> list[str]:
    known = logging.Logger.manager.loggerDict
    return [name for name, logger in list(known.items()) if isinstance(logger, logging.Logger)]


def _logger(name: str) -> logging.Logger:
    """An existing logger: a client must not create loggers without limit."""
    if name == ROOT:
        return logging.getLogger()
    if name not in _loggers():
        raise RequestError(Code.INVALID_CONFIG, f"there is no logger {name}")
    return logging.getLogger(name)


def _level_name(level: int) -> str:
    return next((name for name, number in LEVELS.items() if level <= number), "FATAL")
