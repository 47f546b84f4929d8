"""Steps in a row, each device beginning the next one when it has ended one."""

from __future__ import annotations

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
    size, units = program.size, [*program.units]
    roles = np.array([unit.role for unit in units])
    stages = np.array([unit.stage for unit in units])
    read = [len(units)] if read_s else []
    units += [ComputeUnit(-1, read_s, role=Role.OVERHEAD) for _ in read]
    # Instead of a gather its beginning, and behind that one the unit that waits for its end.
    instead = np.arange(len(roles))
    for gather in np.flatnonzero(roles == Role.GATHER).tolist():
        instead[gather] = len(units)
        units += [units[gather]._replace(role=role) for role in (Role.SHARE, Role.SHARED)]
    code, first = [], [0]
    for listed in np.split(program.entries, program.first[1:-1]):
        unit = np.maximum(~listed - size, -1)  # -1 for messages
        listed, unit = (
            part[roles[unit] * (unit >= 0) != Role.AGREEMENT] for part in (listed, unit)
        )
        role = np.where(unit >= 0, roles[unit], -1)
        stage, places = np.unique(
            np.where(role == Role.ACTION, stages[unit], -1), return_index=True
        )
        waits = [
            (at, instead[gather] + 1)
            for at, s in sorted(zip(places.tolist(), stage.tolist(), strict=True))
            for gather in unit[role == Role.GATHER].tolist()
            if s in program.units[gather].stages
        ]
        awaiting, awaited = np.array(waits, np.int64).reshape(-1, 2).T
        posted = listed[listed >= 0]
        posted = posted[program.messages.table["ready"][posted] > 0]
        for step in range(count):
            begin = [len(units)] if step else []
            posts = tuple((posted + step * size).tolist())
            units += [ComputeUnit(-1, 0.0, role=Role.BEGIN, posts=posts) for _ in begin]
            shift = np.where(listed >= 0, step, -step) * size
            row = np.where(unit >= 0, ~(count * size + instead[unit]), listed + shift)
            if step:
                row = np.insert(row, awaiting, ~(count * size + awaited))
            code += [~(count * size + np.array(begin + read, np.int64)), row]
        first.append(sum(map(len, code)))
    return replace(
        program,
        entries=np.concatenate(code),
        first=np.array(first),
        units=units,
        messages=program.messages.repeated(count),
        updates=count,
    )
