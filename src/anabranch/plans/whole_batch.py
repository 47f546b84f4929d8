"""Operators that compute across samples, and the stages that hold them.

A contrastive loss compares every sample of the batch with every other, so its operator is right for
the whole batch only. Its stage has one micro-batch, the whole batch, and one replica; other stages
have micro-batches of any size, whose forwards all come before its own::

    image  F0 F1 F2 F3             B0 B1 B2 B3
    text   F0 F1 F2 F3             B0 B1 B2 B3
    loss               F0-3  B0-3
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from anabranch.errors import InvalidPlanError
from anabranch.graph.opgraph import OpGraph, bits
from anabranch.plans.edges import value_edges
from anabranch.plans.stages import StageGraph


def whole_batch_stages(graph: StageGraph, model: OpGraph) -> tuple[int, ...]:
    """Return the stages with an operator that computes across samples."""
    names = {op.name for op in model.ops if op.whole_batch}
    return tuple(s for s, stage in enumerate(graph.stages) if names & set(stage.operators))


def sliced_batches(graph: StageGraph, model: OpGraph) -> list[str]:
    """Describe stages that need the whole batch but have slices of it, one sentence each."""
    problems = []
    for s in whole_batch_stages(graph, model):
        stage = graph.stages[s]
        if stage.microbatch_size >= graph.batch_size and stage.replicas == 1:
            continue
        name = next(op.name for op in model.ops if op.whole_batch and op.name in stage.operators)
        problems.append(
            f"operator {name} in stage {s} computes across samples, as a contrastive loss or "
            f"SyncBatchNorm does, so it has to see all {graph.batch_size} of the batch at once, "
            f"but the stage has micro-batches of {stage.microbatch_size} on {stage.replicas} "
            f"replica{'s' if stage.replicas > 1 else ''}: give its stage a micro-batch of "
            f"{graph.batch_size} and one replica, the others may keep theirs"
        )
    return problems


def with_whole_batches(graph: StageGraph, model: OpGraph) -> StageGraph:
    """Set the micro-batch to the whole batch where a stage needs it; warm-up counts are kept."""
    chosen = set(whole_batch_stages(graph, model))
    stages = tuple(
        replace(stage, microbatch_size=graph.batch_size, k=1) if s in chosen else stage
        for s, stage in enumerate(graph.stages)
    )
    return replace(graph, stages=stages)


def fitted(graph: StageGraph, model: OpGraph) -> StageGraph:
    """Change a proposal so that operators across samples have the whole batch.

    If their stage has replicas, these operators and their descendants in the stage become a new
    stage on its last devices, and the other devices keep the operators before them. If the stage
    has only such operators, its other devices go to a predecessor, unless they have other stages.

    Raises:
        InvalidPlanError: if the stage would leave devices without work.
    """
    chosen = whole_batch_stages(graph, model)
    if not chosen:
        return graph
    for s in reversed(chosen):
        if graph.stages[s].replicas > 1:
            graph = _parted(graph, model, s, chosen)
    return with_whole_batches(graph, model)


def _parted(graph: StageGraph, model: OpGraph, s: int, chosen: Collection[int]) -> StageGraph:
    """Split a stage before its first operator across samples; the second part has one replica."""
    stage = graph.stages[s]
    mask = model.mask(stage.operators)
    after = mask & model.whole_batch
    for i in bits(after):
        after |= model.descendants[i] & mask
    before = mask & ~after
    cut = len(stage.devices) - 1
    if not before:
        return _given_away(graph, s, stage.devices[:cut], chosen)
    first = replace(stage, operators=model.names(before), devices=stage.devices[:cut])
    second = replace(stage, operators=model.names(after), devices=stage.devices[cut:])
    stages = (*graph.stages[:s], first, second, *graph.stages[s + 1 :])
    stage_of = {name: i for i, part in enumerate(stages) for name in part.operators}
    data = value_edges([stage_of[op.name] for op in model.ops], model)
    # Stage edges without values order stages.
    moved = {(x + (x > s), y + (y > s)) for x, y in graph.edges}
    kept = {(x, y) for x, y in moved if x != s} | {(s + 1, y) for x, y in moved if x == s}
    return replace(graph, stages=stages, edges=tuple(sorted(data | kept)))


def _given_away(
    graph: StageGraph, s: int, devices: tuple[int, ...], chosen: Collection[int]
) -> StageGraph:
    """Take devices from stage s; those without another stage go to one of its predecessors."""
    stages = list(graph.stages)
    stages[s] = replace(stages[s], devices=stages[s].devices[len(devices) :])
    idle = [device for device in devices if graph.stages_of[device] == (s,)]
    if not idle:
        return replace(graph, stages=tuple(stages))
    takers = [x for x in graph.predecessors[s] if x not in chosen]
    if not takers:
        raise InvalidPlanError(
            f"stage {s} computes across samples in {graph.stages[s].operators[0]}, so it cannot "
            f"share a batch among {graph.stages[s].replicas} replicas"
        )
    taker = max(takers, key=lambda x: len(graph.stages[x].operators) / graph.stages[x].replicas)
    held = (*stages[taker].devices, *idle)
    if len(held) > graph.batch_size:
        raise InvalidPlanError(
            f"stage {taker} would have {len(held)} devices, the batch only {graph.batch_size} "
            "samples"
        )
    size = max(stages[taker].microbatch_size, len(held))
    stages[taker] = replace(stages[taker], devices=held, microbatch_size=size)
    return replace(graph, stages=tuple(stages))
