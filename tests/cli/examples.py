"""Models, plans and planners that several tests of the command line share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.cost import CostModel
from anabranch.planner.even import Even
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from tests.simulator.helpers import chain, cluster, cost_model

TOWERS = "tests.cli.models:towers"


def by_hand(stages: Sequence[tuple[str, Sequence[int]]], size: int, **more: Any) -> dict[str, Any]:
    """The document of a plan for ``TOWERS``, so that nothing is measured or searched: the parts of
    each stage, its devices, and samples in a micro-batch, of eight.
    """
    operators = {part: [f"{part}.0", f"{part}.2"] for part in ("left", "right")} | {
        "head": ["head"]
    }
    entries = [
        {
            "operators": [name for part in parts.split() for name in operators[part]],
            "devices": [*devices],
            "microbatch_size": size,
        }
        for parts, devices in stages
    ]
    return {
        "schema": "anabranch.plan/1",
        "model": TOWERS,
        "cluster": f"local:{sum(len(devices) for _, devices in stages)}",
        "batch_size": 8,
        "schedule": "1f1b",
        "stages": entries,
        "edges": [[i, len(entries) - 1] for i in range(len(entries) - 1)],
        **more,
    }


def four(memory_bytes: int = 10**9):
    """The costs of ``written``."""
    machines = cluster(4, memory_bytes=memory_bytes)
    return cost_model(chain(4), [1.0] * 4, [2.0] * 4, machines, parameter_bytes=100)


def a_plan(*stages: Stage, step_s: float = 1.0, notes: tuple[str, ...] = ()) -> Plan:
    """A plan by hand, as far as the table looks."""
    edges = tuple((i, i + 1) for i in range(len(stages) - 1))
    graph = StageGraph(stages, edges, 8)
    predicted = Prediction(step_s, step_s / 16, 0.25, (2**30,) * len(graph.devices))
    return Plan(
        graph, "1f1b", "even", "m", "c", "p", 0.5, 1.0, predicted, notes=notes, improve_s=2.0
    )


def planners_of(out: str) -> list[str]:
    """The first words of the rows of a table with two lines of headings below the title."""
    rows = out[: out.index("costs:")].splitlines()[3:]
    return [row.split()[0] for row in rows]


@dataclass(frozen=True)
class Interrupted:
    """A planner that proposes what ``even`` would, or nothing, and then meets Ctrl-C."""

    proposes: bool
    schedules = ("1f1b",)

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        if self.proposes:
            yield from Even()(cost, batch_size=batch_size, microbatch_size=batch_size)
        raise KeyboardInterrupt
