"""Compute that only takes time: a device waits as long as a stage would compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.graph.split import Port
from anabranch.runtime.compute.stage_compute import Key, Outcome
from anabranch.runtime.messages import Layout, gradient_ports
from anabranch.simulator.costs import StepCosts


class EmulatedCompute:
    """A ``Compute`` that waits for the profiled seconds and makes tensors that nobody reads.

    All outputs of one size are the same buffer, whose content never changes, so any number of them
    may be on its way. The loss of an emulated step is 0.
    """

    def __init__(self, layout: Layout, costs: StepCosts, clock: DeviceClock) -> None:
        self._layout, self._costs, self._clock = layout, costs, clock
        self._buffers: dict[torch.Size, Tensor] = {}

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        return Outcome()

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self._wait(key, 0)
        program = self._layout.program(*key)
        return {port.value: self._buffer(program.shapes[port.value][0]) for port in program.outputs}

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        self._wait(key, 1)
        program = self._layout.program(*key)
        ports = gradient_ports(program.inputs)
        return {port: self._buffer(program.shapes[port.value][0]) for port in ports}

    def _wait(self, key: Key, which: int) -> None:
        self._clock.charge()
        start, stop = self._layout.slice(*key)
        self._clock.pass_by(self._costs.compute_s(key[0], stop - start)[which])
        self._clock.resume()

    def _buffer(self, shape: torch.Size) -> Tensor:
        if shape not in self._buffers:
            self._buffers[shape] = torch.zeros(shape, dtype=torch.uint8)
        return self._buffers[shape]
