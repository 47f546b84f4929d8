"""Stages that take mini-batch after mini-batch without a flush.

The order of N mini-batches of B samples is that of one synchronous 1F1B step of N * B samples on
the same stages. What differs are the in-flight counts: no batch ends, so none is cut to the
micro-batches of one.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.errors import InvalidPlanError
from anabranch.plans.in_flight import least_in_flight, with_in_flight
from anabranch.plans.stages import StageGraph

ORDER = "1f1b"
"""The only order there is without a flush: a deeper warm-up would make weights more stale."""


def repeated(graph: StageGraph, batches: int) -> StageGraph:
    """The same stages with so many mini-batches in a row as one batch."""
    return replace(graph, batch_size=batches * graph.batch_size)


def full_pipeline(graph: StageGraph, *, per_hop: int = 1) -> StageGraph:
    """The same stages with the micro-batches in flight that each has where no batch ends."""
    most = max(stage.microbatch_size for stage in graph.stages)
    # No count can reach the number of micro-batches of so large a batch.
    long = replace(graph, batch_size=most * (per_hop * graph.depth + 1))
    return with_in_flight(graph, least_in_flight(long, per_hop=per_hop))


def warm_up(graph: StageGraph) -> StageGraph:
    """Set every stage's ``in_flight`` to that of the full pipeline, in micro-batches.

    That is the longest distance to a sink plus 1, however few micro-batches a mini-batch has.

    Raises:
        InvalidPlanError: if micro-batches do not divide the mini-batch or differ in size, or stages
            alternate groups of several.
    """
    sizes = [stage.microbatch_size for stage in graph.stages]
    if len(set(sizes)) > 1:
        raise InvalidPlanError(
            f"stage {sizes.index(max(sizes))} has micro-batches of {max(sizes)} samples, stage "
            f"{sizes.index(min(sizes))} of {min(sizes)}; asynchronous training updates all stages "
            "after the same samples: give all stages one microbatch_size"
        )
    for s, stage in enumerate(graph.stages):
        if graph.batch_size % stage.microbatch_size:
            raise InvalidPlanError(
                f"stage {s} has micro-batches of {stage.microbatch_size} samples, which do not "
                f"divide a mini-batch of {graph.batch_size}; without a flush every mini-batch must "
                "end with a whole one: choose a size that divides it"
            )
        if stage.k > 1:
            raise InvalidPlanError(
                f"stage {s} alternates groups of {stage.k} micro-batches; asynchronous training "
                "alternates single ones: make k 1 in the plan"
            )
    return full_pipeline(graph)
