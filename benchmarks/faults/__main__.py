"""Faults, counted: what is refused, named, resumed, and how soon.

python -m benchmarks.faults [--only damage saves kills hangs] [--count 500] [--json]
"""

from __future__ import annotations

import argparse
import json

from benchmarks.faults import checkpoints, processes

PARTS = {
    "damage": checkpoints.damage,
    "saves": checkpoints.saves,
    "kills": processes.kills,
    "hangs": processes.hangs,
}
"""Name -> what measures it, for a number of drawn cases: figures by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, default=500, help="drawn cases, where cases are drawn")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {name: PARTS[name](arguments.count) for name in arguments.only}
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        print(name)
        for what, value in figures.items():
            print(f"  {what:34s} {value}")


if __name__ == "__main__":
    main()
