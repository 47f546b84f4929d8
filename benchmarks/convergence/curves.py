"""Pages of curves: held-out accuracy after every epoch, and at every depth, mean over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planners.common import Row

STYLES: dict[str, tuple[str, str]] = {
    "synchronous": ("#1c2530", "-"),
    "naive": ("#b3261e", ":"),
    "stash": ("#d17b0f", "-"),
    "stash, NAdam": ("#d17b0f", "--"),
    "vertical-sync": ("#8794a5", "-"),
    "2bw": ("#8a5fbf", "-"),
    "spectrain": ("#2f9e6b", "--"),
    "pipeoptim": ("#1769c4", "-"),
    "predict-stash": ("#2f9e6b", "-"),
    "predict-stash, options": ("#0b5d3b", "-."),
    "2bw-ef": ("#c2185b", "-"),
    "2bw-ef, Muon": ("#c2185b", "--"),
    "synchronous, Muon": ("#1c2530", "--"),
    "asyncpp": ("#00838f", "-"),
    "basis-rotation": ("#6d4c41", "-"),
}
"""Colour and dashes of each contender."""


def draw(cases: Mapping[str, Sequence[Row]], file: Path) -> None:
    """Write the page as PNG or SVG, by the file's name; a panel per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "curves"
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(6 * columns, 3.6 * lines), squeeze=False, layout="constrained"
    )
    for panel, (title, rows) in zip(grid.flat, cases.items(), strict=False):
        _panel(panel, title, rows)
    for panel in list(grid.flat)[len(cases) :]:
        panel.set_visible(False)
    found = {}
    for panel in grid.flat:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    ordered = [name for name in STYLES if name in found]
    figure.legend(
        [found[name] for name in ordered],
        ordered,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _panel(panel: Any, title: str, rows: Sequence[Row]) -> None:
    highest, lowest = 0.0, 100.0
    for row in rows:
        curves = 100 * np.array(row["curves"])
        mean = curves.mean(0)
        epochs = np.arange(1, len(mean) + 1)
        colour, dashes = STYLES[row["contender"]]
        panel.plot(epochs, mean, dashes, color=colour, label=row["contender"], linewidth=1.6)
        highest = max(highest, mean.max())
        if row["contender"] in ("synchronous", "stash", "pipeoptim", "predict-stash"):
            error = curves.std(0, ddof=min(1, len(curves) - 1)) / np.sqrt(len(curves))
            panel.fill_between(epochs, mean - error, mean + error, color=colour, alpha=0.15, lw=0)
            lowest = min(lowest, mean[len(mean) // 4])
    panel.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.05 * (highest - lowest))
    panel.set_title(f"{title}, {len(rows[0]['accuracy'])} seeds", fontsize=11)
    panel.set_xlabel("epoch")
    panel.set_ylabel("held-out accuracy, %")
    panel.grid(color="#dbe1e9", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def draw_depths(tasks: Mapping[str, Sequence[Row]], file: Path) -> None:
    """Write accuracy over depth as PNG or SVG, a panel per task; what has no depth goes across."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "depths"
    figure, panels = pyplot.subplots(
        1, len(tasks), figsize=(6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for panel, (title, rows) in zip(panels.flat, tasks.items(), strict=True):
        depths = sorted({row["depth"] for row in rows if row["depth"]})
        for name, (colour, dashes) in STYLES.items():
            means = {r["depth"]: np.mean(r["accuracy"]) for r in rows if r["method"] == name}
            if 0 in means:
                means = dict.fromkeys(depths, means[0])
            if means:
                ordered = sorted(means)
                heights = [means[depth] for depth in ordered]
                marker = "" if len(set(heights)) == 1 else "o"
                panel.plot(
                    ordered, heights, dashes, color=colour, marker=marker, markersize=4, label=name
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks(depths, [str(depth) for depth in depths])
        panel.set(title=title, xlabel="stages", ylabel="held-out accuracy, percent")
        panel.grid(color="#e3e7ec", linewidth=0.6)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
