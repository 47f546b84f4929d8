"""Slices of micro-batches: the samples of one micro-batch on one replica.

Each micro-batch is split over the replicas of its stage as evenly as whole samples allow, and the
last micro-batch of a batch may be a short one::

    batch 10, micro-batch 6, 4 replicas     micro-batch 0:  1 2 1 2      micro-batch 1:  1 1 1 1

A profile must have a price for every such slice; a replica without samples needs none.
"""

from __future__ import annotations

from anabranch.cost import CostModel


def slice_sizes(microbatch_size: int, replicas: int) -> tuple[int, int]:
    """Return the fewest and most samples among the non-empty slices of a micro-batch."""
    return max(1, microbatch_size // replicas), -(-microbatch_size // replicas)


def profile_covers(cost: CostModel, batch_size: int, microbatch_size: int, replicas: int) -> bool:
    """Return True if the profile covers every slice of a stage."""
    sizes = [*slice_sizes(microbatch_size, replicas)]
    short = batch_size % microbatch_size
    if short:
        sizes += slice_sizes(short, replicas)
    # The profile covers a range, so checking its ends is enough.
    return cost.covers(min(sizes)) and cost.covers(max(sizes))
