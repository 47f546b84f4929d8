"""Work of one emulated rank that only takes time: passes, and sums of gradients beside the last.

Sums are the all-reduces of ``simulator.run``, piece by piece, each as soon as the operators that
add to it have been passed. On modelled links the shared memory of all ranks has the start and end
of a sum; on links of the host as many bytes really travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.emulation import Emulation
from anabranch.graph.cutting.split import Port
from anabranch.runtime.compute.outcome import Key, Outcome
from anabranch.runtime.messages import Layout, gradient_ports
from anabranch.runtime.ranks.collectives import Pending
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.schedule.schedule import Kind
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.sums import gradient_marks

POLL_S = 1e-3
"""Device seconds between two looks at sums whose end is not known yet."""


class EmulatedSums:
    """All-reduces of a rank in a step; a ``Watcher`` of its worker."""

    def __init__(self, emulation: Emulation, clock: DeviceClock, mesh: Mesh) -> None:
        self._emulation, self._clock = emulation, clock
        self._own = [i for i, w in enumerate(emulation.sums) if mesh.device in w.devices]
        self._host = _HostSums(emulation, self._own, mesh) if emulation.links == "host" else None
        self._last = -1
        self._final: tuple[int, ...] = ()

    def before_last(self, stage: int) -> None:
        self._last = stage

    def during(self, stage: int, samples: int, backward_s: float) -> float:
        """Go on to the last gradients that become final in a backward; return the seconds left.

        Args:
            samples: samples of this device's slice.
        """
        if stage != self._last:
            return backward_s
        emulation = self._emulation
        pieces = emulation.final.get(stage, {})
        *marks, last = gradient_marks(emulation.costs, pieces, stage, samples, backward_s)
        for mark in marks:
            self._clock.pass_by(mark.seconds)
            self._give(mark.pieces)
        self._final = last.pieces
        return last.seconds

    def after_last(self, stage: int) -> None:
        self._give(self._final)
        self._last, self._final = -1, ()

    def _give(self, pieces: Sequence[int]) -> None:
        for piece in pieces:
            if self._host is not None:
                self._host.give(piece)
            else:
                self._emulation.shared_links.give(piece, self._clock.now)

    def finish(self) -> None:
        """After the last action: wait for the sums."""
        clock = self._clock
        clock.charge()
        if self._host is not None:
            self._host.finish()
            clock.catch_up()
            return
        clock.pace()
        while True:
            end, is_sure = self._emulation.shared_links.ended(self._own, clock.now)
            clock.meet(end if is_sure else max(end, clock.now + POLL_S))
            if is_sure:
                return


class _HostSums:
    """Sums of zeros; sums of one set of ranks start in the same order on all of them."""

    def __init__(self, emulation: Emulation, pieces: Sequence[int], mesh: Mesh) -> None:
        self._emulation, self._mesh = emulation, mesh
        self._queues: dict[int, list[int]] = defaultdict(list)
        for piece in pieces:
            self._queues[emulation.sums[piece].queue].append(piece)
        most = max((emulation.sums[piece].nbytes for piece in pieces), default=0)
        self._zeros = torch.zeros(-(-most // 4))
        self._begin()

    def _begin(self) -> None:
        self._missing = {
            piece: sum(
                self._mesh.device in self._emulation.plan.stage_graph.stages[s].devices
                for s in self._emulation.sums[piece].stages
            )
            for queue in self._queues.values()
            for piece in queue
        }
        self._left = {queue: list(pieces) for queue, pieces in self._queues.items()}
        self._pending: list[Pending] = []

    def give(self, piece: int) -> None:
        """Count gradients of a piece as final, and start the sums that can start."""
        self._missing[piece] -= 1
        left = self._left[self._emulation.sums[piece].queue]
        while left and not self._missing[left[0]]:
            work = self._emulation.sums[left.pop(0)]
            zeros = self._zeros[: -(-work.nbytes // 4)]
            self._pending.append(self._mesh.start_all_reduce(zeros, self._emulation.ranks(work)))

    def finish(self) -> None:
        """Wait for all sums, and get ready for the next step."""
        for pending in self._pending:
            pending.wait()
        self._begin()


class EmulatedCompute:
    """A ``Compute`` that waits for the profiled seconds and makes tensors that nobody reads.

    All outputs of one size are the same buffer, whose content never changes, so it may be in any
    number of messages at once. The loss of an emulated step is 0.
    """

    def __init__(
        self,
        layout: Layout,
        costs: StepCosts,
        clock: DeviceClock,
        sums: EmulatedSums,
        split: Collection[int] = (),
    ) -> None:
        self._layout, self._costs, self._clock, self._sums = layout, costs, clock, sums
        self._split = split
        self._buffers: dict[torch.Size, Tensor] = {}

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        return Outcome()

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self._wait(key, Kind.FORWARD)
        program = self._layout.program(*key)
        return {port.value: self._buffer(program.shapes[port.value][0]) for port in program.outputs}

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        self._wait(key, Kind.INPUT_GRADIENT if key[0] in self._split else Kind.BACKWARD)
        program = self._layout.program(*key)
        ports = gradient_ports(program.inputs)
        return {port: self._buffer(program.shapes[port.value][0]) for port in ports}

    def weight_gradients(self, key: Key) -> None:
        self._wait(key, Kind.WEIGHT_GRADIENT)

    def _wait(self, key: Key, kind: Kind) -> None:
        self._clock.charge()
        start, stop = self._layout.slice(*key)
        seconds = self._costs.pass_s(key[0], kind, stop - start)
        if not kind.is_forward:
            seconds = self._sums.during(key[0], stop - start, seconds)
        self._clock.pass_by(seconds)
        self._clock.resume()

    def _buffer(self, shape: torch.Size) -> Tensor:
        if shape not in self._buffers:
            self._buffers[shape] = torch.zeros(shape, dtype=torch.uint8)
        return self._buffers[shape]
