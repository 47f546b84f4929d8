"""Stages that compute nothing, with messages of the right size.

The profile knows what flows between stages: bytes per sample of every value, and whether a gradient
of the same size comes back. As ``StageProgram``s without calls these give ``Layout`` what it needs
to work out every message, as for a model.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx, nn

from anabranch.graph.opgraph import OpGraph
from anabranch.graph.split import Port, StageProgram
from anabranch.plans.edges import edge_values
from anabranch.plans.stages import StageGraph
from anabranch.remembered import remembered


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
        spec = self._model.values[value]
        return torch.Size((samples, spec.nbytes) if spec.batched else (spec.nbytes,))
