"""The table of served APIs, built from the `api_*` modules in this package. To add an API, add a file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Api:
    name: str
    key: int
    low: int
    high: int
    text: str
    """The module's docstring: versions, behaviour, gaps."""
    flexible_from: int | None
    """None: ask `kio`."""
    answer: Callable[..., Any] | None
    handle: Callable[..., Any] | None
    is_pure: bool
    """Whether `handle` runs in any thread (`context.py`)."""


def _find() -> dict[int, Api]:
    package = importlib.import_module(__package__ or "")
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("api_"):
            module = importlib.import_module(f"{__package__}.{info.name}")
            found[module.KEY] = Api(
                name=info.name,
                key=module.KEY,
                low=module.VERSIONS[0],
                high=module.VERSIONS[1],
                text=module.__doc__ or "",
                flexible_from=getattr(module, "FLEXIBLE_FROM", None),
                answer=getattr(module, "answer", None),
                handle=getattr(module, "handle", None),
                is_pure=getattr(module, "IS_PURE", False),
            )
    return found


APIS = _find()
