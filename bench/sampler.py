"""Measures our side of one row once per line of input: what `bench.against` runs in each of two checkouts.

`against` starts this file by its path with the other checkout's interpreter, so `bench` and `millstream` are that
checkout's own. Nothing here may rely on more of `bench` than a checkout of last month has.
"""

import sys

from bench.__main__ import all_measures
from bench.measure import Scale


def main() -> None:
    key, quick = sys.argv[1], sys.argv[2] == "quick"
    [measure] = [measure for measure in all_measures() if measure.key == key]
    with measure.sides(Scale(1, quick)) as (_, ours):
        print("ready", flush=True)
        for _ in sys.stdin:
            print(f"sample {ours()!r}", flush=True)


if __name__ == "__main__":
    main()
