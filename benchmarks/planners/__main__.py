"""Every planner on every case under one simulator.

    python -m benchmarks.planners [--profiles FOLDER] [--groups map ...] [--planners auto ...]

Measures what the file of results does not have yet, adds it, and prints the table. ``--again``
measures what it has anew; ``--show`` prints without measuring.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from anabranch.files.plans import load_plan
from benchmarks.planners import results, tables
from benchmarks.planners.cases import Case, cases
from benchmarks.planners.contestants import CONTESTANTS, applies, judged, measure

FILE = Path(__file__).parent / "results.json"
GROUPS = tuple(tables.COLOURS)


def main() -> None:
    """Measure, merge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=FILE, help="file of results to add to")
    parser.add_argument("--profiles", type=Path, help="folder of public profiles")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--planners", nargs="+", choices=CONTESTANTS, default=tuple(CONTESTANTS))
    parser.add_argument("--first", type=int, help="so many cases of each group")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--again", action="store_true", help="measure known rows anew")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--merge", type=Path, nargs="*", default=(), help="results of others")
    parser.add_argument("--plan", type=Path, help="judge a plan file of another planner's")
    parser.add_argument("--case", help="for --plan: the name of the case")
    parser.add_argument("--name", help="for --plan: the name of the planner")
    parser.add_argument("--by", default="", help="for --plan: who made it")
    parser.add_argument("--detail", nargs="*", choices=GROUPS, default=(), help="print all steps")
    parser.add_argument("--picture", type=Path, help="draw, as SVG or PNG")
    arguments = parser.parse_args()
    try:
        rows = results.load(arguments.results)
        for file in arguments.merge:
            rows = results.merged(rows, results.load(file))
        if arguments.plan is not None:
            rows = results.merged(rows, [_plan_row(parser, arguments)])
        elif not arguments.show:
            rows = _measured(rows, arguments)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    results.save(rows, arguments.results)
    sys.stdout.write(f"{tables.summary(rows)}\n")
    for group in arguments.detail:
        text = tables.winners(rows) if group == "map" else tables.detail(rows, group)
        sys.stdout.write(f"\n## {group}\n\n{text}\n")
    if arguments.picture is not None:
        tables.draw(rows, arguments.picture)


def _measured(rows: list[results.Row], arguments: argparse.Namespace) -> list[results.Row]:
    """The rows with those that were missing; saved as they come."""
    known = {(row["case"], row["planner"]) for row in rows if row["by"] == "anabranch"}
    seen: dict[str, int] = {}
    ends = time.monotonic() + 60 * arguments.minutes
    for case in cases(arguments.profiles):
        seen[case.group] = seen.get(case.group, 0) + 1
        if case.group not in arguments.groups or seen[case.group] > (arguments.first or 10**9):
            continue
        for name in arguments.planners:
            done = (case.name, name) in known and not arguments.again
            if done or not applies(name, case):
                continue
            if time.monotonic() > ends:
                return rows
            row = measure(case, name, arguments.profiles)
            rows = results.merged(rows, [row])
            results.save(rows, arguments.results)
            sys.stderr.write(f"{case.name}: {name} {row.get('step_s', row.get('error'))}\n")
    return rows


def _plan_row(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> results.Row:
    if not (arguments.case and arguments.name and arguments.by):
        parser.error("--plan needs --case, --name and --by")
    found: dict[str, Case] = {case.name: case for case in cases(arguments.profiles)}
    if arguments.case not in found:
        parser.error(f"no case {arguments.case!r}; one is {next(iter(found))!r}")
    plan, case = load_plan(arguments.plan), found[arguments.case]
    return judged(case, plan, arguments.name, arguments.by, arguments.profiles)


if __name__ == "__main__":
    main()
