"""Cores that stand idle while ranks wait for others, where there are more ranks than cores.

The system moves a waiting rank to an idle core only now and then (Linux with every tick of some
milliseconds), and may wake one on a busy core beside an idle one. Ranks stand in a ring, in which
one more of them than there are cores always has something to do::

    rank 0 --> rank 1 --> rank 2 --> rank 3 --> rank 0
      works      works      works      waits

So no core ever has to be idle, and the time in which one was is shared out to the waits, all of
which begin where there is enough to do for all cores, as those do behind which it is lost. It ends
with such a tick, or when a rank on the full core is through: so the longer ranks work between
waits, the more is lost. On two cores a core idled .3 ms per wait with 1 ms of work behind each, .7
with 4, 1.1 with 13 and 1.5 with 25. Rounds with short and with long work tell how much it is at
most, and in how much work most of that is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.calibration.machine import idle_s
from anabranch.runtime.transport import Transport

_ROUNDS = 4
_TURNS = 60, 12
"""Of a round with short work, and of one with long."""
_PIECES = (1, 2, 3), (10, 20, 30)
"""Of work between two waits, in turn; about a millisecond each."""
_WAIT_S = 3e-4
"""A shorter wait is that of a message which was about to come."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Turns:
    """What one rank saw in one round: how long cores had idled since the machine was started, at
    its begin and at its end; its own processor seconds, and how often it waited.
    """

    begin_idle_s: float
    end_idle_s: float
    processor_s: float
    waits: int


def measure_turns(
    transport: Transport, rank: int, size: int, cores: int, tag: int, meet: Callable[[], None]
) -> list[list[Turns]]:
    """This rank's rounds with short work, and those with long; call it on all ranks of a host,
    which are more than its cores.
    """
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    values, nothing = torch.randn(4, 256), torch.zeros(1)
    specs = [(nothing.shape, nothing.dtype)]
    before, behind = (rank - 1) % size, (rank + 1) % size
    begins = rank * (cores + 1) // size != (rank + 1) * (cores + 1) // size
    found: list[list[Turns]] = [[], []]
    for kind in (0, 1) * _ROUNDS:
        meet()
        begin_idle_s, used, waits = idle_s(), time.process_time(), 0
        for turn in range(_TURNS[kind]):
            if turn or not begins:
                asked = time.perf_counter()
                transport.receive(specs, _CPU, before, tag).wait()
                waits += time.perf_counter() - asked > _WAIT_S
            for _ in range(_PIECES[kind][(turn + rank) % len(_PIECES[kind])]):
                torch.autograd.backward(block(values).sum())
            transport.send([nothing], behind, tag)
        used = time.process_time() - used
        found[kind].append(Turns(begin_idle_s, idle_s(), used, waits))
        if begins:
            transport.receive(specs, _CPU, before, tag).wait()
    return found


def crowding(ranks: Sequence[Sequence[Sequence[Turns]]]) -> tuple[float, float]:
    """Seconds of a core that are lost at most for each wait, and the work in which all but 1/e of
    that is, which is no more than the long work; 0 without any.

    Args:
        ranks: of each the rounds with short and with long work.
    """
    if not all(ranks):
        return 0.0, 0.0
    (short_s, short_work_s), (most_s, long_work_s) = (
        _per_wait([rounds[kind] for rounds in ranks]) for kind in (0, 1)
    )
    if not short_s < most_s:
        return most_s, 0.0
    if not short_s:
        return most_s, long_work_s
    return most_s, min(long_work_s, -short_work_s / math.log1p(-short_s / most_s))


def _per_wait(ranks: Sequence[Sequence[Turns]]) -> tuple[float, float]:
    """Seconds in which a core was idle, and seconds of work, for each wait of all rounds."""
    rounds = [*zip(*ranks, strict=True)]
    waits = sum(turn.waits for turns in rounds for turn in turns)
    if not waits:
        return 0.0, 0.0
    # Until the first is through its turns: then there is less to do. The kernel tells idling to
    # 10 ms, which is too little for one round, and may take back some of what it has told.
    idled_s = sum(
        min(t.end_idle_s for t in turns) - min(t.begin_idle_s for t in turns) for turns in rounds
    )
    work_s = sum(turn.processor_s for turns in rounds for turn in turns)
    return max(0.0, idled_s) / waits, work_s / waits
