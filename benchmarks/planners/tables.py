"""Tables and the picture of a file of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.planners.cases import cases
from benchmarks.planners.common import Row, milliseconds, table
from benchmarks.planners.contestants import CONTESTANTS

SAME = 0.005
"""Steps that differ by less are equal: the simpler plan, in the order of ``KINDS``, has won."""

KINDS = ("data parallelism", "chain", "graph")

COLOURS = {
    "models": "#2f6fd0",
    "map": "#6aa5e8",
    "branches": "#7a52c7",
    "table4": "#f2a23a",
    "drawn": "#c3cad3",
    "small": "#58b368",
    "scale": "#d9534f",
}


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Case -> its rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def ratios(rows: Sequence[Row]) -> dict[str, list[tuple[str, float]]]:
    """Planner -> per case with a plan its group, and the step over the best of all planners."""
    found: dict[str, list[tuple[str, float]]] = {}
    for mine in by_case(rows).values():
        planned = [row for row in mine if "step_s" in row]
        if len(planned) > 1:
            best_s = min(row["step_s"] for row in planned)
            for row in planned:
                found.setdefault(name_of(row), []).append((row["group"], row["step_s"] / best_s))
    return found


def name_of(row: Row) -> str:
    """A planner, with its author where that is not us."""
    name: str = row["planner"]
    return name if row["by"] == "anabranch" else f"{name} ({row['by']})"


def summary(rows: Sequence[Row]) -> str:
    """The table: a line per planner, over all cases."""
    found = ratios(rows)
    lines = []
    for name in sorted(found, key=lambda name: list(CONTESTANTS).index(name.split(" (")[0])):
        mine = [row for row in rows if name_of(row) == name]
        factors = [factor for _, factor in found[name]]
        known = CONTESTANTS.get(name)
        seconds = [row["cpu_s"] for row in mine if "cpu_s" in row and "step_s" in row]
        lines.append(
            [
                name,
                known.objective if known else "",
                known.all_reduce if known else "",
                known.memory if known else "",
                f"{len(factors)}",
                f"{sum('error' in row for row in mine)}",
                f"{sum(factor <= 1 + 1e-6 for factor in factors) / len(factors):.0%}",
                f"{math.exp(statistics.fmean(map(math.log, factors))):.3f}",
                f"{max(factors):.2f}",
                f"{statistics.median(seconds):.2f}" if seconds else "-",
            ]
        )
    columns = ["planner", "minimises", "all-reduce in it", "memory", "cases", "no plan", "best in"]
    return table([*columns, "step over best", "worst", "median CPU s"], lines)


def detail(rows: Sequence[Row], group: str) -> str:
    """Steps in ms, a line per case and a column per planner; the floor last."""
    cases_of_group = {row["case"] for row in rows if row["group"] == group}
    mine = [row for row in rows if row["case"] in cases_of_group]
    names = [name for name in CONTESTANTS if any(name_of(row) == name for row in mine)]
    names += sorted({name_of(row) for row in mine} - set(names))
    lines = []
    for case, some in by_case(mine).items():
        steps = {name_of(row): row for row in some}
        floor = f"{some[0]['floor_s'] * 1e3:.1f}"
        lines.append([case, *(milliseconds(steps.get(name)) for name in names), floor])
    return table(["case", *names, "work floor"], lines)


def winners(rows: Sequence[Row]) -> str:
    """The map: which kind of plan wins, a line per model and mini-batch, a column per cluster.

    Some cases are those of other groups as well, and measured once.
    """
    known, lines = by_case(rows), dict[str, list[str]]()
    columns: dict[str, None] = {}
    for case in (case for case in cases(None) if case.group == "map"):
        line = lines.setdefault(f"{case.model}, {case.batch}", [])
        columns[case.change or f"{case.machines().num_devices}"] = None
        line.append(verdict(known.get(case.name, ())))
    return table(["mini-batch", *columns], ([name, *line] for name, line in lines.items()))


def verdict(rows: Sequence[Row]) -> str:
    """The simplest kind of plan among the best of a case, and by how much it beats simpler ones."""
    least = {kind: _least(rows, kind) for kind in KINDS}
    known = {kind: step_s for kind, step_s in least.items() if step_s is not None}
    if not known:
        return "nothing fits"
    limit = min(known.values()) * (1 + SAME)
    winner = next(kind for kind in KINDS if known.get(kind, math.inf) <= limit)
    simpler = [known[kind] for kind in KINDS[: KINDS.index(winner)] if kind in known]
    return f"{winner} {min(simpler) / known[winner]:.2f}x" if simpler else winner


def _least(rows: Sequence[Row], kind: str) -> float | None:
    steps = [row["step_s"] for row in rows if "step_s" in row and kind_of(row) == kind]
    return min(steps, default=None)


def kind_of(row: Row) -> str:
    """What a plan is, by its shape."""
    if row["stages"] == 1:
        return "data parallelism"
    return "chain" if row["depth"] == row["stages"] else "graph"


def draw(rows: Sequence[Row], file: Path) -> None:
    """A point per planner and case: its step over the best of all planners. PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    matplotlib.rcParams["svg.hashsalt"] = "planners"
    found = ratios(rows)
    names = [*CONTESTANTS, *sorted(found.keys() - CONTESTANTS.keys())]
    names = [name for name in names if name in found][::-1]
    figure, axes = pyplot.subplots(figsize=(10, 0.5 * len(names) + 1.6), layout="constrained")
    for height, name in enumerate(names):
        for i, (group, factor) in enumerate(sorted(found[name], key=lambda one: one[1])):
            # Points of a planner are spread over its row, so that equal ones are seen.
            y = height + 0.32 * (2 * ((i * 0.618) % 1) - 1)
            axes.plot(min(factor, 10), y, "o", ms=3.2, color=COLOURS[group], mew=0, alpha=0.8)
        mean = math.exp(statistics.fmean(math.log(factor) for _, factor in found[name]))
        axes.plot([mean, mean], [height - 0.4, height + 0.4], color="#1c2530", lw=1.6)
        axes.text(mean * 1.01, height + 0.38, f"{mean:.3f}", fontsize=8, va="bottom")
    axes.set_xscale("log")
    ticks = [1, 1.1, 1.25, 1.5, 2, 3, 5, 10]
    axes.set_xticks(ticks, [*(f"{tick:g}x" for tick in ticks[:-1]), "10x or more"])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0.985, 11)
    axes.set_ylim(-0.6, len(names) - 0.1)
    axes.set_xlabel("predicted step over that of the best planner; bar: geometric mean")
    axes.grid(axis="x", color="#e4e8ed", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    groups = [group for group in COLOURS if any(row["group"] == group for row in rows)]
    dots = [Line2D([], [], marker="o", ls="", color=COLOURS[g], label=g) for g in groups]
    figure.legend(handles=dots, loc="outside upper center", ncols=len(dots), frameon=False)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
