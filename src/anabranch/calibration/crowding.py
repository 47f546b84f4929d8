"""Cores that stand idle while ranks wait for others, where there are more ranks than cores.

The system moves a waiting rank to an idle core only now and then (Linux with every tick of some
milliseconds), and may wake one on a busy core beside an idle one. Ranks stand in a ring, in which
one more of them than there are cores always has something to do::

    rank 0 --> rank 1 --> rank 2 --> rank 3 --> rank 0
      works      works      works      waits

So no core ever has to be idle, and the time in which one was is shared out to the waits. Work
between two waits is of a few milliseconds, as that of a pass; behind passes of 25 ms about twice as
much was lost as behind 3 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.runtime.transport import Transport

_ROUNDS, _TURNS = 4, 60
_PIECES = 1, 2, 3
"""Of work between two waits, in turn; about a millisecond each."""
_WAIT_S = 3e-4
"""A shorter wait is that of a message which was about to come."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Turns:
    """What one rank did in one round: when it began and ended, its processor seconds, and how often
    it waited.
    """

    begin: float
    end: float
    processor_s: float
    waits: int


def measure_turns(
    transport: Transport, rank: int, size: int, cores: int, tag: int, meet: Callable[[], None]
) -> list[Turns]:
    """This rank's rounds; call it on all ranks of a host, which are more than its cores."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    values, nothing = torch.randn(4, 256), torch.zeros(1)
    specs = [(nothing.shape, nothing.dtype)]
    before, behind = (rank - 1) % size, (rank + 1) % size
    begins = rank * (cores + 1) // size != (rank + 1) * (cores + 1) // size
    found = []
    for _ in range(_ROUNDS):
        meet()
        begin, used, waits = time.perf_counter(), time.process_time(), 0
        for turn in range(_TURNS):
            if turn or not begins:
                asked = time.perf_counter()
                transport.receive(specs, _CPU, before, tag).wait()
                waits += time.perf_counter() - asked > _WAIT_S
            for _ in range(_PIECES[(turn + rank) % len(_PIECES)]):
                torch.autograd.backward(block(values).sum())
            transport.send([nothing], behind, tag)
        used = time.process_time() - used
        found.append(Turns(begin, time.perf_counter(), used, waits))
        if begins:
            transport.receive(specs, _CPU, before, tag).wait()
    return found


def crowded_s(ranks: Sequence[Sequence[Turns]], cores: float) -> float:
    """Seconds of a core that are lost for each wait; of the median round, 0 without any.

    Args:
        cores: without what other processes take of them.
    """
    lost = []
    for turns in zip(*ranks, strict=True):
        seconds = max(turn.end for turn in turns) - min(turn.begin for turn in turns)
        idle = cores * seconds - sum(turn.processor_s for turn in turns)
        waits = sum(turn.waits for turn in turns)
        lost.append(max(0.0, idle) / waits if waits else 0.0)
    return statistics.median(lost) if lost else 0.0
