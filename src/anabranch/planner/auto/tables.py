"""Tables: what the compiled evaluator reads of a cost model, as arrays of records.

Everything here is the cost model's own figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.cost.overheads import slowdown_of
from anabranch.graph.opgraph import BATCH, OpGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Records = NDArray[Any]
"""One row per stage, edge and so on, whose columns have names."""

UNKNOWN, UNCOVERED = -1, -2
"""In place of a row of seconds: nobody has asked for it yet; the profile does not cover it."""


def record(ints: str, floats: str = "") -> np.dtype[Any]:
    """The type of records with these columns of integers, and these of floats."""
    names: list[tuple[str, type[Any]]] = [(name, np.int64) for name in ints.split()]
    return np.dtype(names + [(name, np.float64) for name in floats.split()])


OPERATOR = record("", "parameters trainable kept largest")
"""Bytes on each device of a replica: of the parameters that an operator alone reads, and of the
trainable ones; kept per sample; of the largest gradient.
"""

SECONDS = record("", "forward backward")
"""Of an operator."""

VALUE = record("producer first end grad", "per_sample fixed")
"""A value that others read: bytes per sample, or without a batch dimension; whether gradients of
the same size flow back; places of its readers.
"""

PARAMETER = record("nbytes trainable first end lookups row_bytes rows")
"""A parameter: places of its readers; of a table whose gradients are rows those that a sample looks
up, and the bytes of those of a batch where they are less than the whole.
"""

LEVEL = record("group", "per_byte_s latency_s")
"""A level of the cluster: devices in a group, seconds of a message that climbs so far."""

RING = record("", "per_byte_s latency_s")
"""Seconds of a message of a ring."""

CHARGES = record(
    "batch_size max_replicas receive_slots",
    "memory_bytes optimizer_factor microbatch_s step_s agreement_s send_s send_byte_s "
    "receive_s receive_byte_s sum_tensor_s sum_byte_s update_s update_tensor_s update_byte_s",
)
"""Numbers of the cost model besides; seconds as in ``cost.overheads``."""


class Tables(NamedTuple):
    """What there is to read; n operators, T tensor degrees, D devices.

    Attributes:
        degrees: [T] of tensor parallelism, ascending from 1.
        operators: [T, n] of ``OPERATOR``.
        op_edges: [edges, 2] operators of which the second reads a value of the first.
        row: [T, samples + 1] row of a slice in ``seconds``, ``UNKNOWN`` or ``UNCOVERED``.
        seconds: [rows, n] of ``SECONDS``.
        values: of ``VALUE``.
        value_readers: operators that read each, one value's behind another's.
        parameters: of ``PARAMETER``, last ones first, as their gradients become final.
        parameter_readers: operators that read each, ascending.
        levels: of ``LEVEL``.
        rings: [levels, D + 1] of ``RING``, by their outermost level and number of devices.
        slowdown: of devices of a host that compute side by side; empty where none shares cores.
        charges: one ``CHARGES``.
    """

    degrees: Ints
    operators: Records
    op_edges: Ints
    row: Ints
    seconds: Records
    values: Records
    value_readers: Ints
    parameters: Records
    parameter_readers: Ints
    levels: Records
    rings: Records
    slowdown: Floats
    charges: Records


def tables_of(cost: CostModel, batch_size: int, max_replicas: int | None = None) -> Tables:
    """The figures of a cost model; no seconds yet."""
    row = np.full((len(cost.tensor_degrees), batch_size + 1), UNKNOWN, dtype=np.int64)
    values, value_readers = _values(cost.graph)
    parameters, parameter_readers = _parameters(cost)
    levels, rings = _links(cost)
    return Tables(
        degrees=_ints(cost.tensor_degrees),
        operators=_operators(cost),
        op_edges=_ints(end for edge in cost.graph.edges for end in edge).reshape(-1, 2),
        row=row,
        seconds=np.zeros((_ROWS, len(cost.graph)), dtype=SECONDS),
        values=values,
        value_readers=value_readers,
        parameters=parameters,
        parameter_readers=parameter_readers,
        levels=levels,
        rings=rings,
        slowdown=_slowdown(cost),
        charges=_charges(cost, batch_size, max_replicas or cost.cluster.num_devices),
    )


def with_seconds(tables: Tables, cost: CostModel, degree: int, samples: int) -> Tables:
    """The same with a slice of so many samples under the tensor degree of that index.

    Room for rows is doubled where it is used up; otherwise the arrays are changed in place.
    """
    if not cost.covers(samples):
        tables.row[degree, samples] = UNCOVERED
        return tables
    count = int(tables.row.max()) + 1
    if count == len(tables.seconds):
        more = np.zeros_like(tables.seconds)
        tables = tables._replace(seconds=np.concatenate([tables.seconds, more]))
    forward, backward = cost.op_seconds(samples, cost.tensor_degrees[degree])
    tables.seconds[count]["forward"], tables.seconds[count]["backward"] = forward, backward
    tables.row[degree, samples] = count
    return tables


_ROWS = 8
"""Slices of different sizes for which there is room at first."""


def _operators(cost: CostModel) -> Records:
    degrees = cost.tensor_degrees
    operators = np.zeros((len(degrees), len(cost.graph)), dtype=OPERATOR)
    for row, tensor in zip(operators, degrees, strict=True):
        row["parameters"], row["trainable"] = cost.own_parameter_bytes(tensor)
        row["kept"], row["largest"] = cost.kept_bytes(tensor), cost.largest_gradients(tensor)
    return operators


def _values(model: OpGraph) -> tuple[Records, Ints]:
    sent = [value for value in model.values if value.producer != BATCH and value.consumers]
    values = np.zeros(len(sent), dtype=VALUE)
    values["first"], values["end"], readers = _lists([value.consumers for value in sent])
    values["producer"] = [value.producer for value in sent]
    values["grad"] = [value.grad for value in sent]
    values["per_sample"] = [value.nbytes * value.batched for value in sent]
    values["fixed"] = [value.nbytes * (not value.batched) for value in sent]
    return values, readers


def _parameters(cost: CostModel) -> tuple[Records, Ints]:
    model = cost.graph
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(model.ops):
        for name in dict.fromkeys(op.parameters):
            readers.setdefault(name, []).append(i)
    read = [parameter for parameter in reversed(model.parameters) if parameter.name in readers]
    parameters = np.zeros(len(read), dtype=PARAMETER)
    lists = [readers[parameter.name] for parameter in read]
    parameters["first"], parameters["end"], listed = _lists(lists)
    parameters["nbytes"] = [parameter.nbytes for parameter in read]
    parameters["trainable"] = [parameter.trainable for parameter in read]
    tables = [p.table if cost.has_rows(p) else None for p in read]
    parameters["rows"] = [cost.row_bytes(parameter) for parameter in read]
    parameters["lookups"] = [table.lookups if table else 0 for table in tables]
    parameters["row_bytes"] = [table.row_bytes if table else 0 for table in tables]
    return parameters, listed


def _links(cost: CostModel) -> tuple[Records, Records]:
    cluster = cost.cluster
    count, devices = len(cluster.levels), cluster.num_devices
    levels, rings = np.zeros(count, dtype=LEVEL), np.zeros((count, devices + 1), dtype=RING)
    for i, (level, row) in enumerate(zip(levels, rings, strict=True)):
        link, group = cluster.level_link(i), cluster.group_sizes[i]
        level["group"], level["per_byte_s"] = group, 1 / link.bandwidth
        level["latency_s"] = link.latency_s
        for n in range(1, devices + 1):
            # The first and the last device of a group are joined by nothing further in.
            row[n] = cost.ring_price((0, group - 1), n)
    return levels, rings


def _slowdown(cost: CostModel) -> Floats:
    slowdown = cost.cluster.slowdown
    most = slowdown_of(slowdown, cost.cluster.levels[0].size) if slowdown else 1.0
    return np.array(slowdown if most > 1 else (), dtype=np.float64)


def _charges(cost: CostModel, batch_size: int, max_replicas: int) -> Records:
    calibration, update = cost.cluster.calibration, cost.update
    charges = np.zeros(1, dtype=CHARGES)
    numbers = {
        "batch_size": batch_size,
        "max_replicas": max_replicas,
        "receive_slots": cost.receive_slots,
        "memory_bytes": cost.cluster.memory_bytes,
        "optimizer_factor": cost.optimizer_factor,
        "microbatch_s": cost.microbatch_s,
        "step_s": cost.step_s,
        "agreement_s": cost.agreement_s(cost.cluster.num_devices),
        "update_s": update.fixed_s,
        "update_tensor_s": update.tensor_s,
        "update_byte_s": update.byte_s,
    }
    if calibration is not None:
        names = [
            "send_s",
            "send_byte_s",
            "receive_s",
            "receive_byte_s",
            "sum_tensor_s",
            "sum_byte_s",
        ]
        numbers.update({name: getattr(calibration, name) for name in names})
    for name, number in numbers.items():
        charges[0][name] = number
    return charges


def _lists(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """Where each list starts and ends, and all of them in a row."""
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return ends[:-1], ends[1:], _ints(item for items in lists for item in items)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)
