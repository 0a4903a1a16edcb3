"""Responses to requests that waited for a write."""

from __future__ import annotations

import logging

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.flowmq import message_id
from millstream.doors.flowmq.targets import Target
from millstream.wire import flowmq as wire
from millstream.wire.flowmq import Command

logger = logging.getLogger(__name__)

SUCCESS = wire.frame(Command.SUCCESS)


def published(target: Target, done: Promise[int]) -> bytes:
    if done.error is not None:
        return _refused(done.error)
    return wire.frame(Command.SUCCESS, target.prefix + b"%d" % done.value())


def answered(name: bytes, done: Promise[None]) -> bytes:
    if done.error is None:
        return SUCCESS
    if isinstance(done.error, RequestError) and done.error.code == Code.INVALID_RECORD_STATE:
        return wire.error(not_leased(name))
    return _refused(done.error)


def _refused(error: BaseException) -> bytes:
    if isinstance(error, RequestError):
        return wire.error(error.detail)
    logger.error("a request failed", exc_info=error)
    return wire.error(Code.UNKNOWN_SERVER_ERROR.text)


def not_leased(name: bytes) -> str:
    """Why a message cannot be acknowledged."""
    if message_id.parse(name) is None:
        return f"{name[:60].decode('utf-8', 'replace')!r} is not a message id"
    return f"message {name.decode()} is not leased to this connection: it was answered, or its lease expired"
