"""Training without a flush: throughput of sleeping stages, and the cost of weight prediction.

python -m benchmarks.asynchronous [--only sleeps prediction] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.asynchronous import prediction, sleeps
from benchmarks.planners.common import Row, machine

Section = tuple[Callable[..., list[Row]], Callable[[list[Row]], str], dict[str, Any]]

SECTIONS: dict[str, Section] = {
    "sleeps": (sleeps.rows, sleeps.show, {"samples": 16, "turns": 1}),
    "prediction": (prediction.rows, prediction.show, {"batch": 8, "steps": 3}),
}
"""Measure, show, and what --quick asks for."""


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="few and small: does it run?")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these tables only")
    arguments = parser.parse_args()
    found: dict[str, Any] = machine()
    for name in arguments.only or SECTIONS:
        measure, show, quick = SECTIONS[name]
        found[name] = measure(**quick) if arguments.quick else measure()
        if not arguments.json:
            sys.stdout.write(f"\n## {name}\n\n{show(found[name])}\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
