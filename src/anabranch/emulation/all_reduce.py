"""All-reduces at the end of an emulated step.

Modelled, they are a rendezvous in shared memory, and nothing is summed. The last rank to come to an
all-reduce leads it: it takes the ring's ports piece by piece, as the simulator does, and so knows
when it was over. On the links of this machine as many bytes as there are gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import torch

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.emulation import Emulation
from anabranch.runtime.mesh import Mesh
from anabranch.simulator.step import MOST_PIECES, PIECE_BYTES


def lead(emulation: Emulation, mine: Iterable[int], clock: DeviceClock) -> None:
    """Come to the all-reduces of this rank, and lead those to which it comes last to their end."""
    shared, came = emulation.shared_links, clock.now
    events = []
    for ring in mine:
        starts = shared.come(ring, came)
        if starts is not None:
            pieces = min(max(-(-emulation.rings[ring].nbytes // PIECE_BYTES), 1), MOST_PIECES)
            events.append((starts, ring, pieces, pieces))
    heapify(events)
    while events:
        at, ring, left, pieces = heappop(events)
        clock.meet(at)
        if left:
            work = emulation.rings[ring]
            ports = emulation.prices.indices(work.ports)
            end = shared.occupy(ports, at, work.seconds / pieces)
            heappush(events, (end, ring, left - 1, pieces))


def reduce(emulation: Emulation, mine: Iterable[int], mesh: Mesh) -> None:
    """Sum as many bytes as this rank has gradients over their holders."""
    bucket = torch.zeros(PIECE_BYTES // 4)
    for ring in sorted(mine, key=lambda ring: (emulation.ranks(ring), ring)):
        left = emulation.rings[ring].nbytes
        while left > 0:
            mesh.all_reduce(bucket[: -(-min(left, PIECE_BYTES) // 4)], emulation.ranks(ring))
            left -= PIECE_BYTES
