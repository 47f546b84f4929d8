"""Drafts of any kind for tests and benchmarks, drawn by a seed."""

import numpy as np

from anabranch.cost import CostModel
from anabranch.planner.auto.draft import Draft


def random_draft(cost: CostModel, batch_size: int, seed: int, *, plain: bool = False) -> Draft:
    """Stages without a circle on all devices; whether they run or fit is not said.

    Args:
        plain: one micro-batch size, a power of two, and every option at its default.
    """
    rng = np.random.default_rng(seed)
    devices = cost.cluster.num_devices
    count = int(rng.integers(1, min(devices, len(cost.graph)) + 1))
    op_stage = _runs(_any_order(cost, rng), count, rng)
    device_stage = _spread(devices, count, rng)
    sizes = [b for b in (2**i for i in range(20)) if b <= batch_size]
    if plain:
        microbatch = np.full(count, rng.choice(sizes))
    elif rng.random() < 0.5:
        microbatch = np.full(count, rng.integers(1, batch_size + 1))
    else:
        microbatch = rng.choice(sizes, count)
    often = rng.random(2) * (not plain)
    k = np.where(rng.random(count) < often[0], rng.integers(1, 4, count), 1)
    recompute = (rng.random(count) < often[1]).astype(int)
    return Draft(
        op_stage,
        device_stage,
        *(tuple(settings.tolist()) for settings in (microbatch, k, recompute)),
        deep=bool(rng.random() < 0.5),
        chained=not plain and bool(rng.random() < 0.2),
        sharded=not plain and bool(rng.random() < 0.3),
    )


def _any_order(cost: CostModel, rng: np.random.Generator) -> list[int]:
    """Operators in topological order, often one branch after another."""
    missing = [mask.bit_count() for mask in cost.graph.predecessors]
    ready = [i for i, left in enumerate(missing) if not left]
    order: list[int] = []
    deep = rng.random() < 0.7
    while ready:
        order.append(ready.pop(-1 if deep and rng.random() < 0.9 else rng.integers(len(ready))))
        for i in range(len(missing)):
            if cost.graph.successors[order[-1]] >> i & 1:
                missing[i] -= 1
                if not missing[i]:
                    ready.append(i)
    return order


def _runs(order: list[int], count: int, rng: np.random.Generator) -> np.ndarray:
    cuts = np.sort(rng.choice(np.arange(1, len(order)), count - 1, replace=False))
    op_stage = np.empty(len(order), dtype=np.int32)
    op_stage[order] = np.searchsorted(cuts, np.arange(len(order)), side="right")
    return op_stage


def _spread(devices: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Every stage has a device; those of a stage are mostly neighbours."""
    device_stage = np.concatenate(
        [np.arange(count), rng.integers(0, count, devices - count)]
    ).astype(np.int32)
    return rng.permutation(device_stage) if rng.random() < 0.2 else np.sort(device_stage)
