"""Short names of stages and actions for pictures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile

from anabranch.plans.plan import operators_text, ranges
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.schedule import Kind

KINDS = {kind: kind.name.lower().replace("_", " ") for kind in Kind}


def shared_prefix(names: Sequence[str]) -> str:
    """Return the leading dotted components common to all names; each name keeps at least one."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1, columns)
    return "".join(f"{parts[0]}." for parts in shared)


def graph_prefix(graph: StageGraph) -> str:
    """Return the common prefix of all operator names of a stage graph."""
    return shared_prefix([name for stage in graph.stages for name in stage.operators])


def same_stages(graph: StageGraph) -> Hashable:
    """Return a key that is equal for stage graphs whose numbers mean the same stages."""
    return tuple((stage.operators, stage.devices) for stage in graph.stages), graph.edges


def operators(stage: Stage, prefix: str) -> str:
    """Format the operators of a stage in one line, see ``plans.plan.operators_text``."""
    return operators_text([name.removeprefix(prefix) for name in stage.operators])


def devices(stage: Stage) -> str:
    """Format the devices of a stage: ``device 3`` or ``devices 0-3``."""
    return f"device{'s' if len(stage.devices) > 1 else ''} {ranges(stage.devices)}"


def branches(graph: StageGraph) -> tuple[int, ...]:
    """Return the number of each stage's branch: a run of stages without fork or join.

    Numbered by their first stages::

        0 -> 1 -> 2 --+
                      +--> 5        (0, 0, 0, 1, 1, 2)
             3 -> 4 --+
    """
    result: list[int] = []
    for before in graph.predecessors:
        goes_on = len(before) == 1 and len(graph.successors[before[0]]) == 1
        result.append(result[before[0]] if goes_on else max(result, default=-1) + 1)
    return tuple(result)
