"""Faults, counted: what is refused, named, resumed, and how soon.

python -m benchmarks.faults [--only damage saves kills hangs ...] [--count 500] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.faults import blame, checkpoints, hosts, processes, schedules, survival, unequal

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "damage": checkpoints.damage,
    "saves": checkpoints.saves,
    "kills": processes.kills,
    "survivals": survival.survivals,
    "copies": survival.copies,
    "hangs": processes.hangs,
    "alive": processes.alive,
    "blame": blame.blame,
    "schedules": schedules.schedules,
    "cut": hosts.cut,
    "unequal": unequal.unequal,
}
"""Name -> what measures it, for a number of drawn cases: figures by name."""

DRAWN = ("kills", "survivals", "hangs", "alive", "blame", "schedules")
"""Those that can begin with another case than the first, to be run in pieces."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, default=500, help="drawn cases, where cases are drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first = {"first": arguments.first}
    found = {
        name: PARTS[name](arguments.count, **(first if name in DRAWN else {}))
        for name in arguments.only
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        print(name)
        for what, value in figures.items():
            print(f"  {what:34s} {value}")


if __name__ == "__main__":
    main()
