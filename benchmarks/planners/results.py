"""The file of results: rows that anybody can add to.

    {"schema": "anabranch.planner-results/1", "rows": [ROW, ...]}

A row is one planner on one case. ``case``, ``group``, ``planner``, ``by`` (who measured it) and
``date`` are always there, and either ``step_s`` or ``error`` with ``message``:

=====================================  =============================================================
step_s, samples_per_s                  predicted by our simulator, the better of both warm-ups
floor_s                                no plan is faster: all work at its best slice, shared evenly
stages, depth, replicas, operators     shape; the last two are lists with an entry per stage
microbatch_size, recompute, schedule   of the plan; ``recompute`` counts stages
peak_bytes                             of the fullest device
search_s, simulate_s, improve_s        wall-clock seconds; ``cpu_s`` of processors, forked ones too
=====================================  =============================================================

Case, planner and ``by`` identify a row: adding one again replaces it, and rows of others stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.planners.common import Row

SCHEMA = "anabranch.planner-results/1"
KEY = ("case", "planner", "by")
NEEDED = (*KEY, "group", "date")


def load(file: Path) -> list[Row]:
    """The rows of a file, none if it does not exist; ValueError if it is none of ours."""
    if not file.exists():
        return []
    document = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{file} is no file of results: its schema is not {SCHEMA!r}")
    rows: list[Row] = document["rows"]
    for i, row in enumerate(rows):
        missing = [name for name in NEEDED if name not in row]
        if missing or ("step_s" in row) == ("error" in row):
            raise ValueError(
                f"{file}: row {i} lacks {', '.join(missing) or 'one of step_s and error'}"
            )
    return rows


def merged(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    """All rows, the second in the place of the first of the same case, planner and author."""
    known = {tuple(row[name] for name in KEY): row for row in (*rows, *others)}
    return list(known.values())


def save(rows: Iterable[Row], file: Path) -> None:
    """Write them, one to a line, so that changes of few are easy to read."""
    ordered = sorted(rows, key=lambda row: (row["group"], row["case"], row["planner"], row["by"]))
    lines = ",\n".join(json.dumps(_short(row), sort_keys=True) for row in ordered)
    text = f'{{"schema": "{SCHEMA}", "rows": [\n{lines}\n]}}\n'
    file.write_text(text, encoding="utf-8")


def _short(row: Row) -> Row:
    """Seconds to six digits: what lies behind them is noise or rounding."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
