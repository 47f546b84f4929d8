"""Plans without a profile: cuts by operator count, and other sizes of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from anabranch.errors import CaptureError, InfeasiblePlanError
from anabranch.graph.capture import Captured
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.edges import value_edges
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph, split_evenly
from anabranch.plans.whole_batch import whole_batch_stages, with_whole_batches
from anabranch.runtime.plan_parts import prepare
from anabranch.schedule import rule_named


def even_plan(graph: OpGraph, num_devices: int, batch_size: int) -> Plan:
    """Return a plan with equal numbers of operators; InfeasiblePlanError for too few operators."""
    count = len(graph)
    if not 1 <= num_devices <= count:
        raise InfeasiblePlanError(
            f"{count} operators do not fill {num_devices} devices; at most {count} can be used"
        )
    cuts = split_evenly(0, count, num_devices)
    edges = value_edges([s for s, (a, b) in enumerate(cuts) for _ in range(a, b)], graph)
    microbatch_size = max(batch_size // (2 * num_devices), 1)
    stages = tuple(
        Stage(tuple(op.name for op in graph.ops[a:b]), (s,), microbatch_size)
        for s, (a, b) in enumerate(cuts)
    )
    rule = "1f1b"
    cut = with_whole_batches(StageGraph(stages, tuple(sorted(edges)), batch_size), graph)
    stage_graph = rule_named(rule).warm_up(cut)
    nothing = Prediction(math.nan, math.nan, math.nan, (0,) * num_devices)
    return Plan(stage_graph, rule, "even", graph.name, "local", "no profile", 0.0, 0.0, nothing)


def workable(captured: Captured, plan: Plan) -> Plan:
    """Enlarge micro-batches until the model works with them (batch normalisation needs two)."""
    graph, failure = plan.stage_graph, None
    size = min(stage.microbatch_size for stage in graph.stages)
    while size < 2 * graph.batch_size:
        size = min(size, graph.batch_size)
        try:
            return with_sizes(captured, plan, dict.fromkeys(range(len(graph)), size))
        except CaptureError as error:
            failure = failure or error
            size *= 2
    assert failure is not None
    raise failure


def in_several(captured: Captured, plan: Plan) -> Plan:
    """Cut the batch into two micro-batches if all stages have one and the model takes half of it.

    A plan is unchanged if a loss of the whole batch reads state that the forward changes: the state
    changes with every micro-batch, so the module, which is called once, would have another loss.
    """
    graph = plan.stage_graph
    whole = set(whole_batch_stages(graph, captured.graph))
    free = [s for s in range(len(graph)) if s not in whole]
    if graph.batch_size < 2 or not free or (whole and captured.graph.stateful):
        return plan
    most = graph.batch_size // 2
    if any(graph.num_microbatches(s) > 1 or graph.stages[s].replicas > most for s in free):
        return plan
    with suppress(CaptureError):
        return with_sizes(captured, plan, dict.fromkeys(free, -(-graph.batch_size // 2)))
    return plan


def in_equal_slices(captured: Captured, plan: Plan) -> Plan:
    """Cut micro-batches so that all replicas of a stage have as many samples, and the batch to a
    multiple of them: with batch normalisation one process can then compute on the same samples.

    Plans with equal slices, or without batch normalisation, or for which the model fails, stay.
    """
    graph = plan.stage_graph
    parted = [s for s, stage in enumerate(graph.stages) if stage.replicas > 1]
    if not captured.graph.normalised or all(len(graph.slice_sizes(s)) == 1 for s in parted):
        return plan
    replicas = math.lcm(*(graph.stages[s].replicas for s in parted))
    most = min(graph.batch_size // 2, *(graph.stages[s].microbatch_size for s in parted))
    size = most // replicas * replicas
    if not size:
        return plan
    cut = replace(plan, stage_graph=replace(graph, batch_size=graph.batch_size // size * size))
    with suppress(CaptureError):
        return with_sizes(captured, cut, dict.fromkeys(parted, size))
    return plan


def with_sizes(captured: Captured, plan: Plan, sizes: Mapping[int, int]) -> Plan:
    """Give some stages other micro-batch sizes; CaptureError if the model fails with them."""
    graph = plan.stage_graph
    stages = tuple(
        replace(stage, microbatch_size=sizes[s], k=1) if s in sizes else stage
        for s, stage in enumerate(graph.stages)
    )
    sized = with_whole_batches(replace(graph, stages=stages), captured.graph)
    sized = rule_named(plan.schedule).warm_up(sized)
    prepare(captured, sized)
    return replace(plan, stage_graph=sized)


def one_after_the_other(captured: Captured, plan: Plan) -> Plan:
    """Put all stages on one device. With batch normalisation, micro-batches become the slices of
    replicas, if these are equal.
    """
    graph = plan.stage_graph
    stages = tuple(replace(stage, devices=graph.devices[:1]) for stage in graph.stages)
    alone = replace(plan, stage_graph=replace(graph, stages=stages))
    parted = [(s, stage) for s, stage in enumerate(graph.stages) if stage.replicas > 1]
    if not captured.graph.normalised or any(p.microbatch_size % p.replicas for _, p in parted):
        return alone
    sizes = {s: stage.microbatch_size // stage.replicas for s, stage in parted}
    return with_sizes(captured, alone, sizes) if sizes else alone


def on_one_device(captured: Captured, plan: Plan, size: int) -> Plan:
    """Put all operators into one stage, with micro-batches of a size, or of the whole batch if an
    operator computes across samples.
    """
    names = tuple(op.name for op in captured.graph.ops)
    graph = StageGraph((Stage(names, (0,), size),), (), plan.stage_graph.batch_size)
    graph = with_whole_batches(graph, captured.graph)
    return replace(plan, stage_graph=rule_named("1f1b").warm_up(graph), schedule="1f1b")
