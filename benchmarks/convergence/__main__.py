"""What each weight policy costs a model: held-out accuracy beside synchronous training.

python -m benchmarks.convergence [--only fixed searched] [--cases mnist-4-sgdm] [--seeds 0-9]
                                 [--policies synchronous stash] [--into FILE] [--curves PAGE]
                                 [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.convergence import curves, study, tables
from benchmarks.convergence.contenders import CONTENDERS
from benchmarks.convergence.training import deterministic
from benchmarks.planners.common import Row, machine

SECTIONS: dict[str, Callable[[study.Case, study.Runs, range, Collection[str]], list[Row]]] = {
    "fixed": study.fixed,
    "searched": study.searched,
}


def seeds_of(text: str) -> range:
    """The seeds that ``10-19`` or ``7`` mean; those on which things were chosen are refused."""
    first, _, last = text.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds or seeds[-1] >= study.SEARCH_SEEDS[0]:
        raise argparse.ArgumentTypeError(
            f"{text} is no range of seeds below {study.SEARCH_SEEDS[0]}, from where on they choose"
        )
    return seeds


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these tables only")
    parser.add_argument("--cases", nargs="*", choices=study.CASES, help="these cases only")
    parser.add_argument("--policies", nargs="*", choices=CONTENDERS, help="these only")
    parser.add_argument(
        "--seeds", type=seeds_of, default=study.SEEDS, help="as in 0-9, or 20-29 for others"
    )
    parser.add_argument("--into", type=Path, help="keep runs in this file, and go on from it")
    parser.add_argument("--curves", type=Path, help="write the page of curves, .png or .svg")
    arguments = parser.parse_args()
    policies = arguments.policies or list(CONTENDERS)
    if "synchronous" not in policies:
        parser.error("--policies: synchronous has to be among them, to compare with")
    deterministic()
    runs = study.Runs(arguments.into)
    found: dict[str, Any] = machine() | {"seeds": [*arguments.seeds]}
    for section in arguments.only or SECTIONS:
        found[section] = {}
        for name in arguments.cases or study.CASES:
            rows = SECTIONS[section](study.CASES[name], runs, arguments.seeds, policies)
            found[section][name] = {"rows": rows, "differences": tables.compared(rows)}
            if not arguments.json:
                sys.stdout.write(f"\n## {section}: {name}\n\n{tables.show(rows)}\n")
                sys.stdout.flush()
    if arguments.curves:
        drawn = found.get("fixed") or found["searched"]
        curves.draw({name: case["rows"] for name, case in drawn.items()}, arguments.curves)
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
