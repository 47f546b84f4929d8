"""Tensors of the schedule's messages, which both ends work out before the first step.

A message is a range of samples of one stage edge, such as ``0SF0>1@1[0:4]``. Forward it carries
every value of the edge once; backward one gradient per use (``Port``) that asks for one. Both ends
know shapes from their own stage's program. Where the range is a part of what a device computes at
once, the batch dimension is cut::

    stage 0, one device, samples 0-3     [ . . | . . ]
                                          0:2    2:4
    stage 1, two devices                 [ . . ] [ . . ]

A value without a batch dimension is whole on every replica. It travels once per slice of the
consumer, with the message that has the slice's first sample, and its gradient comes back that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.graph.cutting.split import Port, StageProgram
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.stages import StageGraph
from anabranch.runtime.transport import Channel
from anabranch.schedule.lower import directions, messages
from anabranch.schedule.schedule import Action


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a message.

    Attributes:
        port: use of the value, for a gradient; None for the value itself.
        shape: shape of the part in the message; one dimension for a single sample.
        batched: whether dimension 0 has the samples; otherwise the value is whole on all replicas.
        offset: start of the part in dimension 0 of the tensor that this device computes.
        own: shape of the part on this device; None for ``shape``. ``squeeze()`` makes another shape
            of a single sample than of several, so the two ends of a message may differ in it.
    """

    value: int
    port: Port | None
    shape: torch.Size
    dtype: torch.dtype
    batched: bool
    offset: int
    own: torch.Size | None = None

    def part(self, tensor: Tensor) -> Tensor:
        """Return the part that travels, of the whole tensor that this device computes."""
        own = self.shape if self.own is None else self.own
        whole = not self.batched or tensor.shape == own
        return (tensor if whole else tensor.narrow(0, self.offset, own[0])).reshape(self.shape)

    def arrived(self, tensor: Tensor) -> Tensor:
        """Return a received part in its shape on this device."""
        return tensor if self.own is None else tensor.view(self.own)


TOKEN = Item(-1, None, torch.Size((1,)), torch.uint8, False, 0)
"""Only item of messages along a stage edge without values, which just make stages wait."""


def assemble(parts: Sequence[tuple[Item, Tensor]]) -> Tensor:
    """Join the parts of a tensor, which tile the samples; a value without samples is whole."""
    if len(parts) == 1:
        return parts[0][0].arrived(parts[0][1])
    ordered = sorted(parts, key=lambda part: part[0].offset)
    tensors = [item.arrived(tensor) for item, tensor in ordered]
    # A value without a batch dimension that several slices read: its gradient is the sum.
    return torch.cat(tensors) if ordered[0][0].batched else torch.stack(tensors).sum(0)


def tag_of(x: int, y: int, num_stages: int, *, back: bool) -> int:
    """Return the number of the channel from stage x to stage y, or back, whatever the edges."""
    return 2 * (x * num_stages + y) + back


def channels(graph: StageGraph) -> list[Channel]:
    """Return all channels that a batch of the planned size uses, the same on every rank."""
    result = set()
    for source, target, forward in directions(graph):
        x, y = (source, target) if forward else (target, source)
        tag = tag_of(x, y, len(graph), back=not forward)
        for message in messages(graph, source, target, forward=forward):
            result.add(Channel(graph.rank_of[message.sender], graph.rank_of[message.receiver], tag))
    return sorted(result)


def gradient_ports(ports: Iterable[Port]) -> tuple[Port, ...]:
    """Return the uses whose gradients flow back, in the order in which they travel."""
    result = (port for port in ports if port.grad)
    return tuple(sorted(result, key=lambda port: (port.value, port.order)))


class ProgramSource(Protocol):
    """Protocol of the programs of stages: ``Split``."""

    def program(self, stage: int, samples: int) -> StageProgram:
        """Return the program of a stage for a number of samples."""


class Layout:
    """The tensors of every message of one device, for one batch size."""

    def __init__(
        self, model: OpGraph, split: ProgramSource, graph: StageGraph, device: int
    ) -> None:
        self._model, self._split, self._graph, self._device = model, split, graph, device

    def slice(self, stage: int, microbatch: int) -> tuple[int, int]:
        """Return the samples [start, stop) of a micro-batch that this device computes."""
        replica = self._graph.stages[stage].devices.index(self._device)
        return self._graph.slice(stage, microbatch, replica)

    def program(self, stage: int, microbatch: int) -> StageProgram:
        """Return the program of a micro-batch here, whose slice must not be empty."""
        start, stop = self.slice(stage, microbatch)
        return self._split.program(stage, stop - start)

    def items(self, action: Action) -> tuple[Item, ...]:
        """Return the tensors of a message, in the order in which they travel."""
        program = self.program(action.stage, action.microbatch)
        ports = program.outputs if self._is_producer(action) else program.inputs
        own = [p for p in ports if action.peer_stage in (p.source, p.target)]
        if not own:
            return (TOKEN,)
        first = self._is_first_of_slice(action)
        if action.kind.is_forward:
            uses: Iterable[tuple[int, Port | None]] = (
                (value, None) for value in sorted({port.value for port in own})
            )
        else:
            uses = ((port.value, port) for port in gradient_ports(own))
        return tuple(
            self._item(action, program, value, port)
            for value, port in uses
            if self._model.values[value].batched or first
        )

    def tag(self, action: Action) -> int:
        """Return the number of the channel: stage edge and direction."""
        x, y = sorted((action.stage, action.peer_stage))
        return tag_of(x, y, len(self._graph), back=not action.kind.is_forward)

    def _is_producer(self, action: Action) -> bool:
        return action.kind.is_send == action.kind.is_forward

    def _is_first_of_slice(self, action: Action) -> bool:
        """Return whether a message has the first sample of its consumer's slice."""
        producer = self._is_producer(action)
        stage = action.peer_stage if producer else action.stage
        device = action.peer if producer else self._device
        consumer = self._graph.stages[stage]
        microbatch = action.start // consumer.microbatch_size
        replica = consumer.devices.index(device)
        return self._graph.slice(stage, microbatch, replica)[0] == action.start

    def _item(self, action: Action, program: StageProgram, value: int, port: Port | None) -> Item:
        shape, dtype = program.shapes[value]
        if not self._model.values[value].batched:
            return Item(value, port, shape, dtype, False, 0)
        start, stop = self.slice(action.stage, action.microbatch)
        if stop - start == 1:
            return Item(value, port, torch.Size((shape.numel(),)), dtype, True, 0, shape)
        rows = shape[0] // (stop - start)  # per sample; more than one where dimensions are merged
        cut = torch.Size((rows * (action.stop - action.start), *shape[1:]))
        flat = torch.Size((cut.numel(),)) if action.stop - action.start == 1 else cut
        own = None if flat is cut else cut
        return Item(value, port, flat, dtype, True, rows * (action.start - start), own)
