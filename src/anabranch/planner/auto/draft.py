"""Draft: a plan under search, as arrays that are cheap to copy and to change.

A draft says which stage holds each operator and each device; what else a ``StageGraph`` has
follows from that::

    operators   a  b  c  d  e        devices        0  1  2  3
    op_stage    0  0  1  1  2        device_stage   0  0  1  2

    stage 0: a b on devices 0 1        stage 1: c d on device 2        stage 2: e on device 3

There is a stage edge where a value crosses. Stage numbers matter only between two stages that no
value orders: the lower one is listed first, and so runs first where stages are chained.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError
from anabranch.graph.digraph import topological_order
from anabranch.plans.edges import value_edges
from anabranch.plans.stages import Stage, StageGraph, successors

Ints = NDArray[np.int32]
Settings = tuple[int, ...]


class Draft(NamedTuple):
    """A plan under search, never changed in place. S is the number of stages.

    Attributes:
        op_stage: [operators] stage of each operator, 0 to S-1.
        device_stage: [devices] stage of each device; those of a stage are its replicas, ascending.
        microbatch: [S] samples of a micro-batch over all replicas.
        k: [S] k of kFkB.
        recompute: [S] 1 if it recomputes, else 0.
        deep: whether the warm-up is that of ``1f1b-deep``, as far as memory allows; else the least.
        chained: whether every stage waits for the one before it.
        sharded: whether replicas share the optimizer's state, see ``CostModel.shard_optimizer``.
        split: whether backwards are split, see ``schedule.zero_bubble``.
    """

    op_stage: Ints
    device_stage: Ints
    microbatch: Settings
    k: Settings
    recompute: Settings
    deep: bool
    chained: bool
    sharded: bool
    split: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.k)


def variants(draft: Draft, *, shared: bool = False, split: bool = False) -> list[Draft]:
    """Return a draft with either warm-up and, if asked for, with and without shared optimizer state
    and with and without split backwards.
    """
    ways = [draft, draft._replace(deep=not draft.deep)]
    if shared:
        ways += [way._replace(sharded=not way.sharded) for way in ways]
    if split:
        ways += [way._replace(split=not way.split) for way in ways]
    return ways


def draft_of(graph: StageGraph, cost: CostModel) -> Draft:
    """Return the draft of a stage graph, with the least warm-up and ascending devices. Edges
    without values are kept only if they chain all stages.

    Args:
        cost: ``shard_optimizer`` says whether the draft is sharded.

    Raises:
        InvalidPlanError: if a device of the cluster holds no stage, or several.
    """
    device_stage = np.full(cost.cluster.num_devices, -1, dtype=np.int32)
    op_stage = np.full(len(cost.graph), -1, dtype=np.int32)
    for s, stage in enumerate(graph.stages):
        if (device_stage[list(stage.devices)] >= 0).any():
            raise InvalidPlanError(
                f"a device of stage {s} holds another stage as well; the search takes plans with "
                "one stage on each device"
            )
        device_stage[list(stage.devices)] = s
        op_stage[[cost.graph.index[name] for name in stage.operators]] = s
    if (device_stage < 0).any():
        raise InvalidPlanError(
            f"device {int(device_stage.argmin())} of {cost.cluster.name} holds no stage; the "
            "search takes plans that use all devices"
        )
    chain = {(s, s + 1) for s in range(len(graph) - 1)}
    return Draft(
        op_stage,
        device_stage,
        tuple(stage.microbatch_size for stage in graph.stages),
        tuple(stage.k for stage in graph.stages),
        tuple(int(stage.recompute) for stage in graph.stages),
        False,
        chain <= set(graph.edges) and not chain <= value_edges(op_stage.tolist(), cost.graph),
        cost.shard_optimizer,
    )


def stage_graph_of(draft: Draft, cost: CostModel, batch_size: int) -> StageGraph:
    """Return the stages of a draft in topological order; between stages that no value orders, the
    lower number first. No k exceeds the micro-batches; a schedule rule sets the counts in flight.

    Raises:
        InvalidPlanError: if stages wait for each other in a circle.
    """
    count, edges = draft.num_stages, value_edges(draft.op_stage.tolist(), cost.graph)
    order = topological_order(successors(count, edges), int)
    if len(order) < count:
        left = sorted(set(range(count)) - set(order))
        raise InvalidPlanError(
            f"stages {', '.join(map(str, left))} wait for each other in a circle: a path of "
            "operators leaves one of them and comes back to it"
        )
    position = {s: i for i, s in enumerate(order)}
    stages = tuple(
        Stage(
            operators=tuple(cost.graph.ops[i].name for i in np.flatnonzero(draft.op_stage == s)),
            devices=tuple(np.flatnonzero(draft.device_stage == s).tolist()),
            microbatch_size=draft.microbatch[s],
            k=min(draft.k[s], -(-batch_size // draft.microbatch[s])),
            recompute=bool(draft.recompute[s]),
        )
        for s in order
    )
    placed = {(position[x], position[y]) for x, y in edges}
    if draft.chained:
        placed |= {(at, at + 1) for at in range(len(order) - 1)}
    return StageGraph(stages, tuple(sorted(placed)), batch_size)
