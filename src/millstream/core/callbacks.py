"""Calls of those who asked to be told: of readers, of watchers, of whoever waits for an answer.

What goes wrong in one of them is its own affair. It is logged, and whoever tells goes on: the others are told all the
same, and what was stored stays stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")


def tell(callback: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
    try:
        callback(*args, **kwargs)
    except Exception:
        logger.exception("who was told something failed to take it")
