"""Our runtime beside ``torch.distributed.pipelining``, and beside its own ideal.

python -m benchmarks.runtime [--only sleeps messages] [--rows 4x8 8x8] [--minutes 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from benchmarks.planners.common import Row, machine
from benchmarks.runtime import (
    checks,
    emulated,
    halves,
    host,
    memory,
    messages,
    profile,
    sleeps,
    towers,
    transformer,
)

Section = tuple[Callable[[], Iterable[Row]], Callable[[list[Row]], str]]

SECTIONS: dict[str, Section] = {
    "sleeps": (sleeps.rows, sleeps.show),
    "messages": (messages.rows, messages.show),
    "transformer": (transformer.rows, transformer.show),
    "towers": (towers.rows, towers.show),
    "memory": (memory.rows, memory.show),
    "halves": (halves.rows, halves.show),
    "emulated": (emulated.rows, emulated.show),
    "host": (host.rows, host.show),
    "profile": (profile.rows, profile.show),
    "checks": (checks.rows, checks.show),
}


def errors(rows: Iterable[Row]) -> list[float]:
    """Of every predicted step, how far it is from the measured one, as a share of the latter."""
    return [
        abs(row["predicted_s"] - row["step_s"]) / row["step_s"]
        for row in rows
        if "predicted_s" in row and "step_s" in row
    ]


def measured(name: str, ends: float, chosen: Collection[str] | None = None) -> list[Row]:
    """The rows of a table; where they are measured one by one, up to this ``time.monotonic``.

    Args:
        chosen: of sleeps, these cases only.
    """
    some = chosen is not None and name == "sleeps"
    rows, found = sleeps.chosen(chosen or ()) if some else SECTIONS[name][0](), []
    for row in rows:
        found.append(row)
        sys.stderr.write(f"{name}: {json.dumps(row)}\n")
        if isinstance(rows, Iterator) and time.monotonic() > ends:
            break
    return found


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these tables only")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="end sleeps and emulated after so long, at the next row",
    )
    parser.add_argument(
        "--rows", nargs="*", metavar="RANKSxMICROBATCHES", help="of sleeps, such as 4x8: these only"
    )
    arguments = parser.parse_args()
    found: dict[str, Any] = machine()
    off: list[float] = []
    ends = time.monotonic() + 60 * arguments.minutes
    for name in arguments.only or SECTIONS:
        found[name] = measured(name, ends, arguments.rows)
        off += errors(found[name])
        if not arguments.json:
            sys.stdout.write(f"\n## {name}\n\n{SECTIONS[name][1](found[name])}\n")
            sys.stdout.flush()
    if off:
        found["prediction"] = {
            "median": statistics.median(off),
            "worst": max(off),
            "steps": len(off),
        }
        if not arguments.json:
            sys.stdout.write(
                f"\nThe simulator's step against the measured one: median error "
                f"{statistics.median(off):.1%}, worst {max(off):.1%}, of {len(off)} steps.\n"
            )
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
