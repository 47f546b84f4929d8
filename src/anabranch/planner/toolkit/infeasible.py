"""Why there is no plan, and what would help: what ``InfeasiblePlanError`` says."""

from __future__ import annotations

from anabranch.cluster import GIB
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError
from anabranch.planner.partitioner.search import Problem
from anabranch.planner.toolkit.prices import degrees, microbatch_sizes

_MORE_MEMORY = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Multiples of the memory that some devices need which are tried for all of them."""

_MOST_DEVICES = 1024
"""Device counts beyond this are not suggested."""


def require_sizes(
    cost: CostModel,
    batch_size: int,
    microbatch_size: int | None,
    max_replicas: int,
    *,
    tensor: int | None = None,
) -> None:
    """Check the arguments that every planner takes.

    Args:
        cost: as for every planner.
        batch_size: as for every planner.
        microbatch_size: as for every planner.
        max_replicas: replicas per stage at most.
        tensor: devices of each replica at most; by default as many as the profile has costs for
            and a node holds.

    Raises:
        ValueError: for a batch or micro-batch that cannot be.
        InfeasiblePlanError: if the profile covers no micro-batch size, or there are more devices
            than operators, replicas and samples can use.
    """
    if batch_size < 1:
        raise ValueError(f"the batch has {batch_size} samples; at least 1 is needed")
    if microbatch_size is not None and not 1 <= microbatch_size <= batch_size:
        raise ValueError(
            f"a micro-batch of {microbatch_size} samples does not fit a batch of {batch_size}"
        )
    total = cost.cluster.num_devices
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(batch_size)
    if not any(
        degrees(cost, size, min(total, max_replicas), batch_size=batch_size) for size in sizes
    ):
        raise InfeasiblePlanError(
            f"the profile ({cost.profile.origin}) covers no way to run micro-batches of "
            f"{microbatch_size or f'1 to {batch_size}'} samples on up to "
            f"{min(total, max_replicas)} replicas per stage; profile again at more sample counts"
        )
    node = cost.cluster.group_sizes[0]
    tensor = tensor or max(t for t in cost.tensor_degrees if node % t == 0)
    each = min(max_replicas, max(sizes))
    usable = len(cost.graph) * each * tensor
    if usable < total:
        wide = f" of {tensor} devices" if tensor > 1 else ""
        raise InfeasiblePlanError(
            f"{cost.graph.name or 'the model'} has {len(cost.graph)} operators with at most {each} "
            f"replicas{wide} each, so at most {usable} of the {total} devices of "
            f"{cost.cluster.name} can be used, and a plan leaves no device without a stage; use "
            f"{usable} devices or fewer, capture the model in finer operators, or allow more "
            "replicas or larger micro-batches"
        )


def explain(problem: Problem, microbatch_size: int | None) -> InfeasiblePlanError:
    """What would make the problem feasible: memory on these devices, or more of these devices."""
    cost = problem.cost
    cluster = cost.cluster
    sizes = [microbatch_size] if microbatch_size else microbatch_sizes(problem.batch_size)
    # Memory never falls with the micro-batch size, so the smallest that is covered needs least.
    size = next(b for b in sizes if problem.prices(b).degrees)
    name = cost.graph.name or "the model"
    memory = _least_memory(problem, size)
    count = _least_devices(problem, size)
    # On all devices, pipelines are longer or micro-batches larger than on as few as will do.
    memory = next(
        (m for m in (memory * ratio for ratio in _MORE_MEMORY) if problem.fills(sizes, m)), memory
    )
    if memory <= cluster.memory_bytes:
        return InfeasiblePlanError(
            f"{name} fits the memory of {cluster.name} on {count} devices, but no plan uses all "
            f"{cluster.num_devices} of them with at most {problem.max_replicas} replicas of a "
            f"stage and micro-batches of up to {max(sizes)} samples, and a plan leaves no device "
            f"without a stage; use {count} devices, or allow more replicas or larger micro-batches"
        )
    more = f"; {count} devices would do" if count else ""
    return InfeasiblePlanError(
        f"{name} needs at least {memory / GIB:.1f} GiB per device on {cluster.num_devices} devices "
        f"(micro-batch {size}); {cluster.name} has {cluster.memory_bytes / GIB:.1f} GiB{more}"
    )


def _least_memory(problem: Problem, size: int) -> float:
    """Bytes per device with which the devices suffice, to a hundredth above."""
    low, high = 0.0, float(problem.cost.cluster.memory_bytes)

    def enough(memory: float) -> bool:
        devices = problem.fewest_devices(size, memory_bytes=memory)
        return devices <= problem.cost.cluster.num_devices

    while not enough(high):
        low, high = high, high * 2
    while high > low * 1.01 and high > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _least_devices(problem: Problem, size: int) -> int | None:
    """Devices of this memory that suffice; None if no number does."""
    devices = problem.fewest_devices(size, limit=_MOST_DEVICES)
    return devices if devices <= _MOST_DEVICES else None
