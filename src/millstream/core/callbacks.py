"""Calls the callbacks of readers, watchers and waiting requests.

A failed callback is logged and affects nothing else: the caller goes on, the other callbacks run, and stored records
stay stored.
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
        logger.exception("callback failed")
