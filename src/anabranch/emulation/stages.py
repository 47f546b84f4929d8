"""Stages that compute nothing: messages of the right size, and compute that only takes time.

The profile knows what flows between stages: bytes per sample of every value, and whether a gradient
of the same size comes back. As ``StageProgram``s without calls these give ``Layout`` what it needs
to work out every message, as for a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from anabranch.emulation.clock import DeviceClock
from anabranch.graph.opgraph import OpGraph
from anabranch.graph.split import Port, StageProgram
from anabranch.plans.edges import edge_values
from anabranch.plans.stages import StageGraph
from anabranch.remembered import remembered
from anabranch.runtime.compute.stage_compute import Key, Outcome
from anabranch.runtime.messages import Layout, gradient_ports
from anabranch.simulator.costs import StepCosts


class EmptyStages:
    """Stages of a profiled model, by number of samples."""

    def __init__(self, model: OpGraph, graph: StageGraph) -> None:
        self._model = model
        uses: dict[int, int] = defaultdict(int)
        ports = []
        for (source, target), values in edge_values(graph, model).items():
            for value in values:
                port = Port(value, source, target, uses[value], model.values[value].grad)
                uses[value] += 1
                ports.append(port)
        self._ports = sorted(ports, key=lambda port: (port.value, port.order))
        self._module = fx.GraphModule(nn.Module(), fx.Graph())

    @remembered
    def program(self, stage: int, samples: int) -> StageProgram:
        """Return the program of a stage for a number of samples, with values as bytes."""
        inputs = tuple(port for port in self._ports if port.target == stage)
        outputs = tuple(port for port in self._ports if port.source == stage)
        shapes = {p.value: (self._shape(p.value, samples), torch.uint8) for p in self._ports}
        return StageProgram(
            self._module, inputs, (), (), outputs, has_loss=False, metrics=(), shapes=shapes
        )

    def _shape(self, value: int, samples: int) -> torch.Size:
        told = self._model.values[value]
        return torch.Size((samples, told.nbytes) if told.batched else (told.nbytes,))


class Sums(Protocol):
    """Protocol of all-reduces that run beside a backward."""

    def during(self, stage: int, samples: int, backward_s: float) -> float:
        """Seconds of a backward that are left when the last gradients in its middle are final."""


class EmulatedCompute:
    """A ``Compute`` that waits for the profiled seconds and makes tensors that nobody reads.

    All outputs of one size are the same buffer, whose content never changes, so any number of them
    may be on its way. The loss of an emulated step is 0.
    """

    def __init__(
        self, layout: Layout, costs: StepCosts, clock: DeviceClock, sums: Sums | None = None
    ) -> None:
        self._layout, self._costs, self._clock, self._sums = layout, costs, clock, sums
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
        seconds = self._costs.compute_s(key[0], stop - start)[which]
        if which and self._sums is not None:
            seconds = self._sums.during(key[0], stop - start, seconds)
        self._clock.pass_by(seconds)
        self._clock.resume()

    def _buffer(self, shape: torch.Size) -> Tensor:
        if shape not in self._buffers:
            self._buffers[shape] = torch.zeros(shape, dtype=torch.uint8)
        return self._buffers[shape]
