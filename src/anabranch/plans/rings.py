"""Rings of devices that all-reduce gradients: replicas of a stage, and stages of a tied parameter.

The gradients of a tied parameter are summed over all devices of all its stages, in one ring. Under
tensor parallelism of degree t the devices with the same shard sum it: one ring for each of the t
positions. Stages that differ in t sum the largest of their shards over all their devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Holder(NamedTuple):
    """A stage with a parameter: devices, devices per replica, share of gradients per device."""

    devices: Sequence[int]
    tensor: int
    shard: float


class Ring(NamedTuple):
    """An all-reduce of gradient bytes over devices of these stages."""

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    nbytes: int


def rings(nbytes: Mapping[tuple[int, ...], int], holders: Sequence[Holder]) -> Iterator[Ring]:
    """Generate the rings of at least two devices.

    Args:
        nbytes: ascending stages -> bytes of the parameters that they all read.
    """
    for stages, size in sorted(nbytes.items()):
        degrees = {holders[s].tensor for s in stages}
        shards = degrees.pop() if len(degrees) == 1 else 1
        held = math.ceil(size * max(holders[s].shard for s in stages))
        for k in range(shards):
            devices = tuple(sorted({d for s in stages for d in holders[s].devices[k::shards]}))
            if len(devices) > 1:
                yield Ring(stages, devices, held)
