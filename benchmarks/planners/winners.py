"""A map of who wins: data parallelism, a chain of stages or a graph of stages, and by how much.

The papers' models on Summit nodes of 4 V100: every number of devices with few and with many samples
for each, then, at 32 devices, a network card four times as fast and as slow, and more memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.cluster import GB, Cluster
from benchmarks.planners.common import Row, milliseconds, plan_row, profile_of, table

BATCHES = {"mmt": (64, 512), "dlrm": (256, 2048), "candle-uno": (4096, 32768)}
"""Mini-batches of GraphPipe, appendix A.2: those for 4 and for 32 devices."""

DEVICES = (4, 8, 16, 32, 64, 128, 256)
BASE_DEVICES = 32
PLANNERS = ("data-parallel", "sequential", "graphpipe")
SAME = 0.005
"""Steps that differ by less are equal: the simpler plan, in the order of ``KINDS``, has won."""

KINDS = ("data parallelism", "chain", "graph")


@dataclass(frozen=True, slots=True)
class Setting:
    """Summit nodes with one thing changed.

    Attributes:
        name: what is changed.
        network: factor on the bandwidth between nodes.
        memory_bytes: of a device, if not its own.
    """

    name: str
    network: float = 1.0
    memory_bytes: int = 0

    def cluster(self, devices: int) -> Cluster:
        """Nodes of 4 devices."""
        preset = Cluster.preset(f"summit:{devices // 4}x4")
        node, network = preset.levels
        return replace(
            preset,
            memory_bytes=self.memory_bytes or preset.memory_bytes,
            levels=(node, replace(network, bandwidth=network.bandwidth * self.network)),
        )


BASE = Setting("as it is")
CHANGED = (
    Setting("network x4", network=4),
    Setting("network x1/4", network=1 / 4),
    Setting("80 GB", memory_bytes=80 * GB),
)


def cases() -> Iterator[tuple[Setting, int]]:
    """One axis at a time: numbers of devices as they are, then changes at one of them."""
    yield from ((BASE, devices) for devices in DEVICES)
    yield from ((setting, BASE_DEVICES) for setting in CHANGED)


def rows(models: Sequence[str] = tuple(BATCHES)) -> list[Row]:
    """One row per model, mini-batch, setting and number of devices."""
    result = []
    for model in models:
        profile = profile_of(model, max(BATCHES[model]))
        for batch in BATCHES[model]:
            for setting, devices in cases():
                cluster = setting.cluster(devices)
                plans = {name: plan_row(name, profile, cluster, batch) for name in PLANNERS}
                case = {"model": model, "batch": batch, "devices": devices}
                case |= {"setting": setting.name, "plans": plans}
                result.append(case | judged(plans))
    return result


def kind_of(row: Row) -> str:
    """What a plan is, by its shape."""
    if row["stages"] == 1:
        return "data parallelism"
    return "chain" if row["depth"] == row["stages"] else "graph"


def judged(plans: dict[str, Row]) -> Row:
    """The kind of the best plan, its step, and how much longer the best simpler one takes.

    ``gain`` is None where nothing simpler has a plan, or nothing is simpler.
    """
    found = [row for row in plans.values() if "step_s" in row]
    if not found:
        return {"winner": None, "step_s": None, "gain": None}
    least_s = {
        kind: min((row["step_s"] for row in found if kind_of(row) == kind), default=None)
        for kind in KINDS
    }
    known = {kind: step_s for kind, step_s in least_s.items() if step_s is not None}
    limit = min(known.values()) * (1 + SAME)
    winner = next(kind for kind in KINDS if known.get(kind, limit * 2) <= limit)
    simpler = [known[kind] for kind in KINDS[: KINDS.index(winner)] if kind in known]
    gain = min(simpler) / known[winner] if simpler else None
    return {"winner": winner, "step_s": known[winner], "gain": gain}


def behind(plans: dict[str, Row]) -> bool:
    """Whether the step of ``graphpipe`` is longer than that of another planner."""
    found = [row["step_s"] for row in plans.values() if "step_s" in row]
    ours_s = plans["graphpipe"].get("step_s", float("inf"))
    return bool(found) and ours_s > min(found) * (1 + SAME)


def verdict(row: Row) -> str:
    """Who wins, in a word and a figure."""
    if row["winner"] is None:
        return "nothing fits"
    if row["gain"] is None:
        return row["winner"] if row["winner"] == KINDS[0] else f"{row['winner']}, alone"
    return f"{row['winner']} {row['gain']:.2f}x"


def show(found: list[Row]) -> str:
    """Who wins, a line per model and mini-batch; then the steps behind it, in ms."""
    lines, steps = [], []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in found):
        mine = [row for row in found if (row["model"], row["batch"]) == (model, batch)]
        lines.append([model, str(batch), *map(verdict, mine)])
        for name in PLANNERS:
            steps.append([model, str(batch), name, *(_step(row, name) for row in mine)])
    columns = [_column(*case) for case in cases()]
    late = [
        f"{row['model']} {row['batch']}, {row['devices']} devices, {row['setting']}"
        for row in found
        if behind(row["plans"])
    ]
    return "\n\n".join(
        [
            "Wins, and how many times as long the best simpler plan takes:",
            table(["model", "mini-batch", *columns], lines),
            "Predicted step, ms:",
            table(["model", "mini-batch", "planner", *columns], steps),
            f"graphpipe is behind another planner in {len(late)}: {'; '.join(late) or '-'}",
        ]
    )


def _column(setting: Setting, devices: int) -> str:
    return str(devices) if setting is BASE else f"{devices}, {setting.name}"


def _step(row: Row, planner: str) -> str:
    plan = row["plans"][planner]
    too_few = planner == "data-parallel" and row["batch"] < row["devices"]
    return "too few samples" if too_few else milliseconds(plan)


COLOURS = dict(zip(KINDS, ("#c3cad3", "#f2a23a", "#2f6fd0"), strict=True))


def draw(found: list[Row], file: Path) -> None:
    """Write a picture as PNG or SVG, by the file's name: a panel per model, a cell per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    matplotlib.rcParams["svg.hashsalt"] = "map"
    models = list(dict.fromkeys(row["model"] for row in found))
    columns = list(cases())
    # The changed settings stand apart, with more room for their names.
    lefts = [i if setting is BASE else i + 0.4 for i, (setting, _) in enumerate(columns)]
    names = [_column(*case).replace(", ", ",\n") for case in columns]
    figure, panels = pyplot.subplots(
        len(models), 1, figsize=(10, 1.55 * len(models) + 0.5), squeeze=False, layout="constrained"
    )
    for model, panel in zip(models, panels[:, 0], strict=True):
        for bottom, batch in enumerate(BATCHES[model]):
            mine = [row for row in found if (row["model"], row["batch"]) == (model, batch)]
            for left, row in zip(lefts, mine, strict=True):
                colour = COLOURS.get(row["winner"], "#ffffff")
                panel.add_patch(Rectangle((left + 0.02, bottom + 0.03), 0.96, 0.94, color=colour))
                ink = "#ffffff" if row["winner"] == "graph" else "#1c2530"
                gain = verdict(row).removeprefix(str(row["winner"])).strip(", ")
                panel.text(left + 0.5, bottom + 0.5, gain, ha="center", va="center", color=ink)
        last = model == models[-1]
        panel.set_xticks([left + 0.5 for left in lefts], names if last else [""] * len(names))
        panel.set_yticks([i + 0.5 for i in range(len(BATCHES[model]))], map(str, BATCHES[model]))
        panel.set_xlim(0, lefts[-1] + 1)
        panel.set_ylim(0, len(BATCHES[model]))
        panel.set_ylabel(f"{model}\nmini-batch")
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    panels[-1, 0].set_xlabel("devices (Summit nodes of 4 V100)")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="outside upper center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
