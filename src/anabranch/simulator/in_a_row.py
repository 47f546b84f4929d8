"""Steps in a row, each device beginning the next one when it has ended one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anabranch.simulator.events import Role
from anabranch.simulator.program import Program
from anabranch.simulator.units import ComputeUnit


def in_a_row(program: Program, count: int, read_s: float) -> Program:
    """So many steps, one after the other: a device begins the next when it has ended one and read a
    batch, which takes ``read_s``, and they agree on nothing in between. What others have updated is
    there when a stage that reads it has its first forward.
    """
    table, size = program.messages, program.size
    units, code = [*program.units], list[int]()
    first = [0]
    read = [~(count * size + len(units))] if read_s else []
    units += [ComputeUnit(-1, read_s, role=Role.OVERHEAD) for _ in read]
    share: dict[int, int] = {}
    shared: dict[int, int] = {}
    for u, unit in enumerate(program.units):
        if unit.role is Role.GATHER:
            share[~(size + u)] = ~(count * size + len(units))
            shared[~(size + u)] = share[~(size + u)] - 1
            units += [unit._replace(role=role) for role in (Role.SHARE, Role.SHARED)]
    for listed in program.code:
        mine = [x for x in listed if ~x < size or units[~x - size].role is not Role.AGREEMENT]
        posted = [x for x in mine if x >= 0 and table.is_posted[x]]
        awaited = _awaited(mine, program.units, size)
        for step in range(count):
            if step:
                code.append(~(count * size + len(units)))
                posts = tuple(message + step * size for message in posted)
                units.append(ComputeUnit(-1, 0.0, role=Role.BEGIN, posts=posts))
            code += read
            for at, x in enumerate(mine):
                if step:
                    code += (shared[gather] for gather in awaited.get(at, ()))
                code.append(share.get(x, _shifted(x, size, step, count)))
        first.append(len(code))
    return replace(
        program,
        entries=np.array(code, np.int64),
        first=np.array(first),
        units=units,
        messages=table.repeated(count),
        updates=count,
    )


def _awaited(code: Sequence[int], units: Sequence[ComputeUnit], size: int) -> dict[int, list[int]]:
    """Map positions that wait for the all-gathers of the last step to entries of these.

    Args:
        size: number of messages.
    """
    gathers = {x: units[~x - size].stages for x in code if ~x >= size}
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for at, x in enumerate(code):
        unit = units[~x - size] if ~x >= size else None
        if unit is not None and unit.role is Role.ACTION and unit.stage not in seen:
            seen.add(unit.stage)
            found[at] = [gather for gather, stages in gathers.items() if unit.stage in stages]
    return found


def _shifted(x: int, size: int, step: int, count: int) -> int:
    """An entry of a device's list where it stands ``step`` lists later, among ``count``."""
    if x >= 0:
        return x + step * size
    return x - step * size if ~x < size else x - (count - 1) * size
