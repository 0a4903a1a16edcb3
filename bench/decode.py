"""Decoding batches to Arrow-ready buffers, against aiokafka's record reader. The work is in bench/kernel.py.

One call of `kernel.measure()` runs both readers alternately and is one round here. It has two references, and they
differ by a factor of two: a loop that looks at every record and keeps none, which is the reader and nothing else and
carries the bounds, and one that keeps all six columns as lists, which is the work that ours does and is given for
information.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.measure import Measure, Scale, Side, Sides, Unavailable

PASSES = 2
PASS_SECONDS = 0.4


def _sides(reference: str) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        try:
            from bench import kernel
        except ImportError as error:
            raise Unavailable(f"the decoder's benchmark cannot be loaded: {error}") from None
        figures: dict[str, float | str] = {}

        def aiokafka() -> float:
            figures.update(kernel.measure(PASSES, scale.seconds(PASS_SECONDS)))
            if figures["kernel"] != "compiled":
                raise Unavailable(f"the kernel is {figures['kernel']}, not compiled: build it with `make setup`")
            return float(figures[f"{reference}_records_per_second"])

        yield aiokafka, lambda: float(figures["columns_records_per_second"])

    return sides


MEASURES = [
    Measure(
        key="decode",
        title="decode to Arrow-ready buffers, compiled kernel",
        reference="aiokafka's record reader",
        unit="records/s",
        must=15,
        aim=25,
        lower_is_better=False,
        sides=_sides("reference_reader"),
    ),
    Measure(
        key="decode-columns",
        title="the same, the reader's records kept as columns",
        reference="aiokafka's reader, lists filled",
        unit="records/s",
        must=None,
        aim=None,
        lower_is_better=False,
        sides=_sides("reference_columns"),
    ),
]
