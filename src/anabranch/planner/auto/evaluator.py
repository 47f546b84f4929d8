"""The evaluator: about how long a draft takes, tens of thousands of times a second.

A compiled simulation in which the replicas of a stage are one machine. It knows what decides which
of two drafts is the quicker one:

- kFkB with the warm-up of Table 2 (``plans.in_flight``), micro-batch sizes and k of every stage;
- messages on links and on the cards of nodes that stages share, beside compute;
- all-reduces in buckets beside the last backward, behind messages on the same links; then updates,
  which wait for all of them, and what replicas that share the optimizer's state send each other;
- memory with recomputation and, without a flush, with versions of the weights;
- processor cores that devices share, one action after the other.

It is no judge: what it likes is simulated (``simulator``). Left out are slices of uneven size,
all-reduces that hold messages up, and parameters that stages share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anabranch.cost import CostModel
from anabranch.cost.model import Floats
from anabranch.cost.stage_weights import Held
from anabranch.graph.opgraph import BATCH
from anabranch.planner.auto.draft import Draft


class Evaluator:
    """Seconds of drafts of one model on one cluster.

    Args:
        max_replicas: of a stage at most; None: no limit.
        versions: of the weights, kept per micro-batch in flight and besides; for training without
            a flush, whose period is asked for then. None: a step.
    """

    def __init__(
        self,
        cost: CostModel,
        batch_size: int,
        *,
        max_replicas: int | None = None,
        versions: tuple[float, float] | None = None,
    ) -> None:
        # Compiling takes seconds the first time, and importing the compiler a quarter of one.
        from anabranch.planner.auto.stage_clock import step_s

        cluster = cost.cluster
        links = [cluster.level_link(level) for level in range(len(cluster.levels))]
        self._step_s: Callable[..., float] = step_s
        self._rest: tuple[Any, ...] = (
            batch_size,
            max_replicas or cluster.num_devices,
            versions is None,
            *_seconds(cost, batch_size),
            _bytes(cost),
            *_values(cost),
            np.array(
                [
                    cluster.group_sizes,
                    [link.bandwidth for link in links],
                    [link.latency_s for link in links],
                ],
                dtype=np.float64,
            ),
            np.array(
                [
                    cluster.memory_bytes,
                    cost.optimizer_factor,
                    cost.receive_slots,
                    cost.update.byte_s,
                    cost.microbatch_s,
                    *_message(cost),
                    _cores(cost),
                    *(versions or (0.0, 0.0)),
                ],
                dtype=np.float64,
            ),
        )

    def __call__(self, draft: Draft, limit: float = math.inf) -> float:
        """About how many seconds; infinity where it cannot run or takes longer than the limit."""
        return self._step_s(*draft, *self._rest, limit)


def _seconds(cost: CostModel, batch_size: int) -> tuple[Any, ...]:
    """Rows of sample counts, of tensor degrees, and per row the seconds of every operator."""
    devices = cost.cluster.num_devices
    sizes = {batch_size, *(1 << i for i in range(batch_size.bit_length()))}
    sizes |= {batch_size % b for b in sizes} - {0}  # the last micro-batch may be a short one
    wanted = {n for b in sizes for r in range(1, min(b, devices) + 1) for n in (b // r, -(-b // r))}
    counts = sorted(n for n in wanted if cost.covers(n))
    row_of = np.full(batch_size + 1, -1)
    row_of[counts] = np.arange(len(counts))
    degree_of = np.full(max(cost.tensor_degrees) + 1, -1)
    degree_of[list(cost.tensor_degrees)] = np.arange(len(cost.tensor_degrees))
    tables = np.array(
        [[cost.op_seconds(n, tensor) for n in counts] for tensor in cost.tensor_degrees]
    ).reshape(len(cost.tensor_degrees), len(counts), 2, len(cost.graph))
    return row_of, degree_of, np.ascontiguousarray(np.moveaxis(tables, 2, 0))


def _bytes(cost: CostModel) -> Floats:
    """Per tensor degree and operator the first rows of ``stage_tables``; a parameter that several
    read counts for the first of them.
    """
    rows = []
    for tensor in cost.tensor_degrees:
        held = Held(*(part.copy() for part in cost.own_parameter_bytes(tensor)))
        for mask, parameter in cost.tied if tensor == 1 else ():
            first = (mask & -mask).bit_length() - 1
            for kind, nbytes in zip(held, cost.held_bytes(parameter), strict=True):
                kind[first] += nbytes
        largest = cost.largest_gradients(tensor, dense=True), cost.largest_gradients(tensor)
        passes = cost.kept_bytes(tensor), cost.working_bytes(tensor)
        rows.append([*held, *largest, *passes])
    return np.array(rows)


def _values(cost: CostModel) -> tuple[Any, ...]:
    """Producers, readers and bytes of the values between operators."""
    values = [v for v in cost.graph.values if v.producer != BATCH and v.consumers]
    return (
        np.array([value.producer for value in values], dtype=np.int64),
        np.cumsum([0, *(len(value.consumers) for value in values)]),
        np.array([c for value in values for c in value.consumers], dtype=np.int64),
        np.array(
            [
                [value.nbytes * value.batched for value in values],
                [value.nbytes * (not value.batched) for value in values],
                [value.grad for value in values],
            ],
            dtype=np.float64,
        ),
    )


def _message(cost: CostModel) -> tuple[float, float]:
    """Processor seconds of a message, half at either end, and for each of its bytes."""
    one, many = sum(cost.message_s(1)) / 2, sum(cost.message_s(1 + 2**20)) / 2
    return one, (many - one) / 2**20


def _cores(cost: CostModel) -> float:
    """Devices that compute at full speed together, where all share cores; 0 where they do not."""
    cluster = cost.cluster
    slowdown = cluster.slowdown
    if not slowdown or not cluster.shared_cores:
        return 0.0
    hosts = cluster.num_devices // cluster.levels[0].size
    return hosts * len(slowdown) / slowdown[-1]
