"""Search time and predicted step of every planner.

python -m benchmarks.planners [--only models] [--profiles FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.planners import evaluator, models, profiles, random_graphs, shapes, table4, winners
from benchmarks.planners.common import Row

Section = tuple[Callable[[argparse.Namespace], Any], Callable[[Any], str]]


def _sweep(arguments: argparse.Namespace) -> list[Row]:
    devices = tuple(int(n) for n in arguments.devices.split(","))
    return list(profiles.rows(arguments.profiles, devices=devices, share=arguments.share))


def _map(arguments: argparse.Namespace) -> list[Row]:
    found = winners.rows()
    if arguments.picture is not None:
        winners.draw(found, arguments.picture)
    return found


SECTIONS: dict[str, Section] = {
    "map": (_map, winners.show),
    "models": (lambda _: models.rows(), models.show),
    "branches": (lambda _: shapes.branch_rows(), shapes.show_branches),
    "case-study": (lambda _: shapes.case_rows(), shapes.show_case),
    "scale": (lambda _: shapes.scale_rows(), shapes.show_scale),
    "random": (
        lambda _: (random_graphs.period_rows(), random_graphs.step_rows()),
        lambda found: random_graphs.show(*found),
    ),
    "evaluator": (lambda arguments: evaluator.rows(arguments.profiles), evaluator.show),
    "table4": (lambda arguments: table4.rows(arguments.profiles), table4.show),
    "profiles": (_sweep, profiles.show),
}
NEEDS_PROFILES = ("table4", "profiles")


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these tables only")
    parser.add_argument("--picture", type=Path, help="file for the picture of the map, SVG or PNG")
    parser.add_argument("--profiles", type=Path, help="folder of public profiles")
    parser.add_argument("--devices", default="4,8,16,32", help="for the table of profiles")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of its cases, drawn with a fixed seed"
    )
    arguments = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in arguments.only or SECTIONS:
        if name in NEEDS_PROFILES and arguments.profiles is None:
            sys.stderr.write(f"{name}: left out, it needs --profiles\n")
            continue
        measure, show = SECTIONS[name]
        found[name] = measure(arguments)
        if not arguments.json:
            sys.stdout.write(f"\n## {name}\n\n{show(found[name])}\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
