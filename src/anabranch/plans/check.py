"""Validity of a stage graph: conditions C1 to C3 of GraphPipe, section 3, and memory.

    C1  every operator is in exactly one stage, and no path leaves a stage and comes back to it
    C2  an operator edge between two stages is a stage edge; there are no cycles
    C3  device sets are disjoint, inside the cluster, and together all of it

A plan made by hand may have several stages on a device (``shared``) and leave devices out
(``idle``): its ranks are its devices, in ascending order. Stage edges without an operator edge are
allowed: they order stages. C4, the order inside a stage, is for ``schedule.check``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, some
from anabranch.plans.in_flight import least_in_flight
from anabranch.plans.plan import memory_text
from anabranch.plans.stages import MOST_MICROBATCHES, StageGraph, slice_sizes
from anabranch.plans.whole_batch import fitted, sliced_batches

_some = partial(some, most=5)


def check(
    graph: StageGraph,
    cost: CostModel,
    versions: Sequence[int] = (),
    *,
    shared: bool = False,
    idle: bool = False,
) -> list[str]:
    """Return the problems of a stage graph, one sentence each; empty if it is valid.

    Args:
        graph: stages of the operators of ``cost.graph`` on the devices of ``cost.cluster``. A
            stage whose ``in_flight`` is 0 is checked with the fewest micro-batches that any 1F1B
            schedule keeps.
        cost: prices of memory, and the sample counts covered by the profile: the largest and the
            smallest slice of every micro-batch must be covered.
        versions: weight versions that each stage holds; empty for one everywhere.
        shared: a device may hold several stages, as in plans made by hand.
        idle: a device may hold no stage, as in plans made by hand.
    """
    if problems := too_many_microbatches(graph):
        return problems
    problems = _operators(graph, cost)
    devices = _devices(graph, cost, shared=shared, idle=idle)
    if problems:
        # Without a partition the rest has no meaning.
        return problems + devices
    masks = [cost.graph.mask(stage.operators) for stage in graph.stages]
    return [
        *_convexity(graph, cost, masks),
        *_edges(graph, cost, masks),
        *devices,
        *unfit_sizes(graph),
        *(problem for s in range(len(graph)) for problem in _unpriced(graph, cost, s)),
        *sliced_batches(graph, cost.graph),
        *_memory(graph, cost, versions or [1] * len(graph), shared=shared),
    ]


def suits(proposal: StageGraph, cost: CostModel) -> bool:
    """Check a proposal after giving whole batches to operators that need them."""
    with suppress(InvalidPlanError):
        return not check(fitted(proposal, cost.graph), cost)
    return False


def require(
    graph: StageGraph,
    cost: CostModel,
    versions: Sequence[int] = (),
    *,
    shared: bool = False,
    idle: bool = False,
) -> None:
    """Raise an InvalidPlanError with all problems that ``check`` finds, if there are any."""
    problems = check(graph, cost, versions, shared=shared, idle=idle)
    if problems:
        raise InvalidPlanError(
            f"the plan does not suit {cost.cluster.name}, or not this model: {'; '.join(problems)}"
        )


def require_few(graph: StageGraph) -> None:
    """Refuse stages of too many micro-batches."""
    if problems := too_many_microbatches(graph):
        raise InvalidPlanError("; ".join(problems))


def require_one_stage_each(graph: StageGraph) -> None:
    """Refuse, for training without a flush, a device with several stages."""
    device, held = max(graph.stages_of.items(), key=lambda item: len(item[1]))
    if len(held) > 1:
        *most, last = map(str, held)
        raise InvalidPlanError(
            f"device {device} has stages {', '.join(most)} and {last}; without a flush a device "
            "alternates forwards and backwards of one stage, and there is no rule for several that "
            "keeps each of them as stale as its policy takes it to be: plan with --mode async, or "
            "with --planner-option several=false for both modes; in a plan made by hand give each "
            "stage devices of its own, or gather these in one stage"
        )


def tied_stages_error(stages: Sequence[int], parameter: str = "") -> InvalidPlanError:
    """Return the error for stages that share a trainable parameter without a flush."""
    *most, last = map(str, stages)
    return InvalidPlanError(
        f"stages {', '.join(most)} and {last} share {parameter or 'parameters'}; without a flush "
        "each stage makes versions of its weights at its own time, so the copies would part: "
        "gather the operators that read it in one stage, give each stage a parameter of its own, "
        "or train with --mode sync"
    )


def _operators(graph: StageGraph, cost: CostModel) -> list[str]:
    known = cost.graph.index
    count = Counter(name for stage in graph.stages for name in stage.operators)
    unknown = sorted(name for name in count if name not in known)
    twice = sorted(name for name, times in count.items() if times > 1)
    missing = [op.name for op in cost.graph.ops if op.name not in count]
    problems = []
    if unknown:
        problems.append(
            f"the model has no operators {_some(unknown)}; it has "
            f"{_some([op.name for op in cost.graph.ops])} (anabranch profile MODEL lists all, with "
            "the options that MODEL is built with)"
        )
    if missing:
        are = "operator is" if len(missing) == 1 else "operators are"
        problems.append(f"C1: {len(missing)} {are} in no stage: {_some(missing)}")
    problems += [f"C1: operator {name} is in {count[name]} stages" for name in twice[:5]]
    return problems


def _convexity(graph: StageGraph, cost: CostModel, masks: list[int]) -> list[str]:
    problems = []
    for s, mask in enumerate(masks):
        if cost.graph.is_convex(mask):
            continue
        between = [
            i
            for i in range(len(cost.graph))
            if not mask >> i & 1
            and cost.graph.ancestors[i] & mask
            and cost.graph.descendants[i] & mask
        ]
        names = [cost.graph.ops[i].name for i in between]
        problems.append(
            f"C1: stage {s} is not convex: a path leaves it and comes back through {_some(names)}"
        )
    return problems


def _edges(graph: StageGraph, cost: CostModel, masks: list[int]) -> list[str]:
    stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
    ops = cost.graph.ops
    present = set(graph.edges)
    problems = []
    for a, b in cost.graph.edges:
        x, y = stage_of[ops[a].name], stage_of[ops[b].name]
        if x == y or (x, y) in present:
            continue
        present.add((x, y))
        what = f"{ops[b].name} in stage {y} reads from {ops[a].name} in stage {x}"
        if x > y:
            problems.append(f"C2: {what}, which comes later: stages are not in topological order")
        else:
            problems.append(f"C2: {what}, but there is no stage edge {x} -> {y}")
    return problems


def _devices(graph: StageGraph, cost: CostModel, *, shared: bool, idle: bool) -> list[str]:
    total = cost.cluster.num_devices
    holders = graph.stages_of
    problems = [
        f"C3: device {device} holds the stages {', '.join(map(str, stages))}"
        for device, stages in holders.items()
        if len(stages) > 1 and not shared
    ]
    outside = sorted(device for device in holders if not 0 <= device < total)
    unused = [device for device in range(total) if device not in holders]
    if outside:
        problems.append(
            f"C3: cluster {cost.cluster.name} has the devices 0-{total - 1}, "
            f"not device{'s' if len(outside) > 1 else ''} {_some(outside)}"
        )
    if unused and not idle:
        problems.append(f"C3: {len(unused)} of {total} devices hold no stage: {_some(unused)}")
    return problems


def too_many_microbatches(graph: StageGraph) -> list[str]:
    """Find stages with so many micro-batches that nothing can be listed or simulated."""
    return [
        f"stage {s} has {graph.num_microbatches(s)} micro-batches of {stage.microbatch_size} "
        f"samples; a stage has {MOST_MICROBATCHES} at most: take a larger micro-batch or a smaller "
        "batch"
        for s, stage in enumerate(graph.stages)
        if graph.num_microbatches(s) > MOST_MICROBATCHES
    ]


def unfit_sizes(graph: StageGraph) -> list[str]:
    """Find micro-batches larger than the batch or smaller than the number of replicas."""
    problems = []
    for s, stage in enumerate(graph.stages):
        size, replicas = stage.microbatch_size, stage.replicas
        if size > graph.batch_size:
            problems.append(
                f"stage {s} has micro-batches of {size} samples, the batch only {graph.batch_size}"
            )
        if size < replicas:
            problems.append(
                f"stage {s} splits micro-batches of {size} samples over {replicas} devices, which "
                f"leaves {replicas - size} of them without work"
            )
    return problems


def _unpriced(graph: StageGraph, cost: CostModel, s: int) -> list[str]:
    """Find slices of a stage outside the range of sample counts in the profile."""
    stage, measured = graph.stages[s], cost.profile.samples
    slices: dict[int, str] = {}
    short = graph.batch_size % stage.microbatch_size
    for what, size in (("its micro-batches", stage.microbatch_size), ("its last one", short)):
        for samples in slice_sizes(size, stage.replicas) if size else ():
            slices.setdefault(samples, f"{what}, {size} samples, over {stage.replicas} replicas")
    return [
        f"stage {s} puts {samples} samples on a device ({why}), which the profile "
        f"({cost.profile.origin}) does not cover: it was measured from {measured[0]} to "
        f"{measured[-1]} samples"
        for samples, why in slices.items()
        if not cost.covers(samples)
    ]


def _memory(
    graph: StageGraph, cost: CostModel, versions: Sequence[int], *, shared: bool
) -> list[str]:
    """Find stages that do not fit, and devices whose stages fit one by one but not together."""
    least, limit = least_in_flight(graph), cost.cluster.memory_bytes
    flights = [stage.in_flight or least[s] for s, stage in enumerate(graph.stages)]
    needs = [
        stage_bytes(graph, cost, s, in_flight=held, versions=versions[s])
        for s, held in enumerate(flights)
    ]
    has = f"cluster {cost.cluster.name} has {memory_text(limit)}"
    problems = [
        f"stage {s} needs {memory_text(needs[s])} on each device, with {flights[s]} micro-batches "
        f"of {stage.microbatch_size} samples in flight on {stage.replicas} replicas"
        f"{f' and {versions[s]} versions of its weights' if versions[s] > 1 else ''}; "
        f"{has}: try a smaller micro-batch or more devices"
        for s, stage in enumerate(graph.stages)
        if needs[s] > limit
    ]
    for device, held in graph.stages_of.items() if shared else ():
        need = sum(needs[s] for s in held)
        if len(held) > 1 and need > limit >= max(needs[s] for s in held):
            problems.append(
                f"device {device} needs {memory_text(need)} for stages "
                f"{', '.join(map(str, held))}; {has}: try a smaller micro-batch or more devices"
            )
    return problems


def stage_bytes(
    graph: StageGraph, cost: CostModel, s: int, *, in_flight: int, versions: int = 1
) -> float:
    """Return the peak bytes on the fullest device of a stage."""
    stage = graph.stages[s]
    return cost.device_bytes(
        [cost.graph.index[name] for name in stage.operators],
        microbatch_size=stage.microbatch_size,
        replicas=stage.replicas,
        in_flight=in_flight,
        recompute=stage.recompute,
        versions=versions,
    )
