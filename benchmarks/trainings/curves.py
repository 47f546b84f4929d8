"""Held-out scores by step, a panel per training, with what is to be beaten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STYLES: Mapping[str, tuple[str, str, float]] = {
    "one process": ("#d17b0f", "-", 5.0),
    "pipeline": ("#1c2530", "-", 1.6),
    "loss of micro-batches": ("#8a5fbf", "-", 1.6),
}
"""Colour, dashes and width of each loop; the wider one lies below the other."""

_DASHES = (":", "--")


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the page, PNG or SVG by the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "trainings"
    lines = -(-len(found) // 2)
    figure, grid = pyplot.subplots(
        lines, min(2, len(found)), figsize=(11, 3.6 * lines), squeeze=False, layout="constrained"
    )
    for panel, (name, row) in zip(grid.flat, found.items(), strict=False):
        _panel(panel, name, row)
    for panel in list(grid.flat)[len(found) :]:
        panel.set_visible(False)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _panel(panel: Any, name: str, row: Mapping[str, Any]) -> None:
    for dashes, (what, value) in zip(_DASHES, row["baselines"].items(), strict=False):
        panel.axhline(value, color="#8794a5", linestyle=dashes, linewidth=1.2, label=what)
    for loop, (colour, dashes, width) in STYLES.items():
        if loop in row["curves"]:
            curve = row["curves"][loop]
            panel.plot(
                curve["steps"],
                curve["scores"],
                dashes,
                color=colour,
                linewidth=width,
                label=f"pipeline, {row['ranks']} ranks" if loop == "pipeline" else loop,
            )
    panel.set_title(name, fontsize=11)
    panel.set_xlabel("step")
    panel.set_ylabel(f"held-out {row['metric']}")
    panel.grid(color="#dbe1e9", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="best")
