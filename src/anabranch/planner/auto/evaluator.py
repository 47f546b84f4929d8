"""The evaluator: about how long a draft takes, tens of thousands of times a second.

A compiled simulation in which the replicas of a stage are one machine. It knows what decides which
of two drafts is the quicker one:

- kFkB with the warm-up of Table 2 (``plans.in_flight``), micro-batch sizes and k of every stage,
  and the last micro-batch, which may be a short one;
- messages on links and on the cards that devices of a node share, beside compute, each as soon as
  its receive is posted; by the slices that replicas of two stages have in common, which may meet
  inside of nodes. On the card of a node they come one after the other, those to several stages in
  turn as far as these wait for them, and a stage goes on with the first: how much later the last is
  counts once, for the replicas behind it are as late in turn;
- all-reduces, piece by piece from within the last backward on, in turn with messages on the same
  links; then updates, which wait for all of them, and what replicas that share the optimizer's
  state send each other;
- memory with recomputation and, without a flush, with versions of the weights;
- how much devices of a host slow each other while they compute, whether they have a core each or
  share some.

It is no judge: what it likes is simulated (``simulator``). Left out are how replicas wait for each
other on the cards of nodes where stages differ in micro-batch size (6 to 10 % of the step in
candle-uno's drafts where cards are slow); and parameters that stages share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.compiled import Ints, Table, record_type, records
from anabranch.cost import CostModel
from anabranch.cost.overheads import computed_at_once, slowdown_of
from anabranch.cost.stage_weights import Held
from anabranch.graph.opgraph import BATCH
from anabranch.planner.auto import stage_records as tables
from anabranch.planner.auto.draft import SETUP, Draft
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.stage_clock import step_s
from anabranch.plans.stages import MOST_MICROBATCHES


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
        cluster, devices = cost.cluster, cost.cluster.num_devices
        covered = (1, batch_size) if cost.profile.proportional else cost.profile.samples
        paces = _paces(cost)
        calibration = cost.calibration
        numbers = (
            *(batch_size, max_replicas or devices, versions is None),
            *(covered[0], covered[-1]),
            *(cluster.memory_bytes, cost.optimizer_factor),
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
        home, owner = np.zeros(len(cost.graph), np.int32), np.zeros(devices, np.int32)
        given = home, owner, np.zeros(devices, SETUP).view(np.recarray)
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
        self._given = tuple(table.data.cast("B") for table in given)
        self._tables = given, problem, state
        self._step_s: Callable[..., float] | None = None

    def __call__(self, draft: Draft, limit: float = math.inf) -> float:
        """About how many seconds; infinity where it cannot run or takes longer than the limit."""
        for memory, values in zip(self._given, draft[:3], strict=True):
            memory[: values.nbytes] = values.tobytes()  # quicker than arrays of records
        given, problem, state = self._tables
        factor = 1 + draft.split * SETTINGS.split_gain  # what has to be saved is no gain
        args = *given, draft.num_stages, *draft[3:], limit / factor, problem, state
        if self._step_s is None:
            self._step_s = step_s.for_types_of(*args)
        return factor * self._step_s(*args)


def _seconds(cost: CostModel) -> tuple[Any, Any]:
    """Sample counts, and the seconds of every operator there: between them they are on a line."""
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
    """Bytes of every operator; a parameter that several read counts for the first of them."""
    table = records(tables.OperatorBytes, len(cost.graph))
    held = Held(*(part.copy() for part in cost.own_parameter_bytes))
    for mask, parameter in cost.tied:
        first = (mask & -mask).bit_length() - 1
        for kind, nbytes in zip(held, cost.held_bytes(parameter), strict=True):
            kind[first] += nbytes
    for name, nbytes in held._asdict().items():
        table[name] = nbytes
    table["largest_gradient"] = cost.largest_gradients
    table["kept"], table["working"] = cost.kept_bytes, cost.working_bytes
    table["kept_fixed"] = cost.kept_fixed_bytes
    return table


def _values(cost: CostModel) -> tuple[list[tuple[Any, ...]], Ints]:
    """Values between operators, and the readers of all of them."""
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
    """[devices that compute, on all hosts alike]: times as long as alone; empty where none slows
    another.
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
