"""The evaluator: an estimate of a draft's step, tens of thousands of times a second.

A compiled simulation in which the replicas of a stage are one machine. It models what decides which
of two drafts is faster:

- kFkB with the warm-up of Table 2 (``plans.in_flight``), micro-batch size and k of every stage, and
  a last micro-batch that may be short;
- messages on links and on the cards that devices of a node share, beside compute, each as soon as
  its receive is posted. They consist of the slices that replicas of two stages have in common,
  which may stay inside a node. On a node's card messages go one after the other, those to several
  stages in turn as far as these wait, and a stage continues with the first. The delay of the last
  message counts once in a step, because the replicas behind it are as late in turn;
- all-reduces, piece by piece from within the last backward on, in turn with messages on the same
  links; then updates, which wait for all of them, and the all-gathers of replicas that share the
  optimizer's state;
- memory with recomputation and, without a flush, with versions of the weights;
- how much devices of a host slow each other while they compute, with a core each or shared cores.

The simulator judges the best drafts. The evaluator leaves out parameters that stages share, and how
replicas wait for each other on cards where stages differ in micro-batch size (6 to 10 % of the step
in candle-uno's drafts where cards are slow).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Ints, Table, record_type, records
from anabranch.cost import CostModel
from anabranch.cost.footprint import ParameterBytes
from anabranch.cost.overheads import computed_at_once, slowdown_of
from anabranch.graph.opgraph import BATCH
from anabranch.planner.auto import stage_records as tables
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.stage_clock import step_s
from anabranch.plans.stages import MOST_MICROBATCHES


class Evaluator:
    """Estimates seconds of drafts of one model on one cluster.

    Args:
        max_replicas: replicas of a stage at most; None: no limit.
        versions: versions of the weights kept per micro-batch in flight, and besides; then seconds
            are those of a period without a flush. None: seconds of a step.
    """

    def __init__(
        self,
        cost: CostModel,
        batch_size: int,
        *,
        max_replicas: int | None = None,
        versions: tuple[float, float] | None = None,
    ) -> None:
        cluster, devices = cost.cluster, cost.cluster.num_devices
        covered = (1, batch_size) if cost.profile.proportional else cost.profile.samples
        paces = _paces(cost)
        calibration = cost.calibration
        numbers = (
            *(batch_size, max_replicas or devices, versions is None),
            *(covered[0], covered[-1]),
            *(cluster.memory_bytes, cost.update.state),
            *(cost.update.byte_s, calibration.pass_s),
            calibration.message_s,
            computed_at_once(cluster) if len(paces) else 0.0,
            *(versions or (0.0, 0.0)),
            *(cost.update.all_temporary, cost.update.largest_temporary),
        )
        links = [cluster.level_link(level) for level in range(len(cluster.levels))]
        node, cards = cluster.group_sizes[0], (*cluster.cards[1:], 1)
        levels = [
            (group, count, link.bandwidth, link.latency_s, level.bandwidth)
            for group, count, link, level in zip(
                cluster.group_sizes, cards, links, cluster.levels, strict=True
            )
        ]
        values, readers = _values(cost)
        shared = devices // node * cards[0] * (cards[0] < node)
        edges = min(len(readers), devices * devices) + devices
        op_stage, device_stage = np.zeros(len(cost.graph), np.int32), np.zeros(devices, np.int32)
        drafted = op_stage, device_stage, np.zeros(3 * devices, np.int32)
        problem = tables.PricedModel(
            records(tables.Numbers, [numbers]),
            *_seconds(cost),
            _bytes(cost),
            records(tables.ValueRecord, values),
            readers,
            records(tables.LevelRecord, levels),
        )
        pieces: Any = np.zeros((devices, len(cost.graph)), record_type(tables.StagePiece))
        state = tables.State(
            records(tables.StageRecord, devices + 1),
            records(tables.EdgeRecord, edges),
            np.zeros(1, np.int64),
            # Unsigned, so that compiled code does not look for negative indices.
            np.zeros((2, devices, devices), np.uint32),
            np.zeros((devices, shared + 1), np.uint32),
            np.zeros((devices, devices), np.int64),
            np.zeros((2, devices + shared)),
            pieces.view(np.recarray),
            np.zeros(len(cost.graph), np.int64),
            paces,
            np.empty((2, edges, min(batch_size, MOST_MICROBATCHES))),
        )
        self._draft_bytes = tuple(table.data.cast("B") for table in drafted)
        self._tables = drafted, problem, state
        self._step_s: Callable[..., float] | None = None

    def __call__(self, draft: Draft, limit: float = math.inf) -> float:
        """Estimate the seconds; infinity if the draft cannot run or takes longer than the limit."""
        op_stage, device_stage, microbatch, k, recompute, *ways = draft
        settings = array("i", microbatch + k + recompute)
        # Quicker than arrays.
        written = op_stage.tobytes(), device_stage.tobytes(), settings.tobytes()
        for memory, values in zip(self._draft_bytes, written, strict=True):
            memory[: len(values)] = values
        drafted, problem, state = self._tables
        factor = 1 + draft.split * SETTINGS.split_gain  # a smaller saving counts as none
        args = *drafted, len(k), *ways, limit / factor, problem, state
        if self._step_s is None:
            self._step_s = step_s.for_types_of(*args)
        return factor * self._step_s(*args)


def _seconds(cost: CostModel) -> tuple[Any, Any]:
    """Return sample counts, and the seconds of operators [n, i, way], linear between the counts."""
    measured = list(cost.profile.samples)
    if cost.profile.proportional:
        measured = [0, measured[0]]
    elif len(measured) == 1:
        measured.append(measured[0] + 1)
    seconds = np.zeros((len(measured), len(cost.graph), 3))
    for n, samples in enumerate(measured):
        if cost.covers(samples):
            ways = *cost.op_seconds(samples), cost.op_weight_s(samples)
            seconds[n] = np.transpose(ways)
    return np.array(measured), seconds


def _bytes(cost: CostModel) -> Table[tables.OperatorBytes]:
    """Return bytes of operators; a parameter of several operators counts for the first."""
    table = records(tables.OperatorBytes, len(cost.graph))
    held = ParameterBytes(*(part.copy() for part in cost.own_parameter_bytes))
    for mask, parameter in cost.tied:
        first = (mask & -mask).bit_length() - 1
        for kind, nbytes in zip(held, cost.parameter_bytes(parameter), strict=True):
            kind[first] += nbytes
    for name, nbytes in held._asdict().items():
        table[name] = nbytes
    table["largest_gradient"] = cost.largest_gradients
    table["kept"], table["working"] = cost.kept_bytes, cost.working_bytes
    table["kept_fixed"] = cost.kept_fixed_bytes
    return table


def _values(cost: CostModel) -> tuple[list[tuple[Any, ...]], Ints]:
    """Return the values between operators, and the readers of all these values in a row."""
    values: list[tuple[Any, ...]] = []
    readers: list[int] = []
    for value in cost.graph.values:
        if value.producer != BATCH and value.consumers:
            first = len(readers)
            readers += value.consumers
            ways = np.array([value.nbytes, value.nbytes * value.grad])
            sizes = ways * value.batched, ways * (not value.batched)
            values.append((value.producer, first, len(readers), *sizes))
    return values, np.array(readers, np.int64)


def _paces(cost: CostModel) -> NDArray[np.float64]:
    """Return how many times as long as alone passes take, by the number of devices that compute,
    spread evenly over hosts; empty if none slows another.
    """
    cluster = cost.cluster
    if not cluster.slowdown:
        return np.empty(0)
    jobs = np.maximum(
        np.arange(cluster.num_devices + 1) * cluster.levels[0].size, cluster.num_devices
    )
    jobs = -(-jobs // cluster.num_devices)
    paces = np.array([slowdown_of(cluster.slowdown, int(count)) for count in jobs])
    return paces if paces[-1] > 1 else np.empty(0)
