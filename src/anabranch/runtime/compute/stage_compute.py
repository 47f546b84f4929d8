"""Computation of one micro-batch of a stage, between two messages::

    forward    values  -> detached leaves -> program -> outputs         gradients    backward
                               |                          |                 |
                               +--------- stash ----------+---- autograd ---+--> gradients of leaves

Autograd ends at the detached leaves, one per use of a value (``Port``), and gradients cross as
messages. Those of parameters accumulate in ``.grad`` over the micro-batches, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from anabranch.device.accelerator import with_seed
from anabranch.graph.cutting.split import Port, StageProgram
from anabranch.graph.reverted import put, unchanged, unchanged_buffers, written_state
from anabranch.plans.stages import StageGraph
from anabranch.runtime.compute.outcome import Key, Outcome
from anabranch.runtime.compute.programs import StageCall, StagePrograms
from anabranch.runtime.compute.replay import ReplayedCall
from anabranch.runtime.compute.split_backward import CallWithWeights
from anabranch.runtime.messages import Layout, gradient_ports
from anabranch.runtime.numerics.offload import Offload
from anabranch.runtime.numerics.precision import LossScale
from anabranch.runtime.numerics.random_ops import step_key


class Compute(Protocol):
    """Computation of micro-batches between messages."""

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        """Start a step."""

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Compute the values that leave a stage from those that enter it."""

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        """Compute gradients of the inputs from those of the outputs; those of weights may wait."""

    def weight_gradients(self, key: Key) -> None:
        """Compute the second half of a backward, if there is one."""


@dataclass(frozen=True, slots=True)
class _BatchSlice:
    """One micro-batch of a stage on this device: ``weights`` of its loss and metrics in those of
    the batch, ``recompute`` if its backward begins with another forward, ``returned`` uses whose
    gradients go back, ``written`` state that the forward changes.
    """

    runnable: StageCall
    start: int
    count: int
    weights: Mapping[str, float]
    recompute: bool
    returned: tuple[Port, ...]
    written: list[Tensor]


@dataclass
class _ActivationStash:
    """One micro-batch between forward and backward; ``state`` is for a forward that is repeated."""

    leaves: list[tuple[Port, Tensor]]
    aliases: list[Tensor]
    outputs: list[tuple[Port, GradientEdge]]
    loss: Tensor | None
    calls: list[CallWithWeights]
    state: Sequence[Tensor] = ()


class StageCompute:
    """Runs the stages' programs of one device under autograd.

    Each micro-batch of a stage draws from a generator of its own, by seed, step, samples and stage,
    so that a resumed run and a recomputed forward repeat it.
    """

    def __init__(
        self,
        layout: Layout,
        graph: StageGraph,
        parameters: Mapping[str, nn.Parameter],
        prepared: StagePrograms,
        *,
        seed: int = 0,
        loss_scale: LossScale | None = None,
        split: Collection[int] = (),
    ) -> None:
        self._split = split
        self._layout, self._graph, self._parameters = layout, graph, parameters
        self._prepared, self._device, self._seed = prepared, prepared.device, seed
        self._offload = Offload(parameters.values(), self._device)
        self._pieces: dict[Key, _BatchSlice] = {}
        self._starts: dict[int, Tensor] = {}
        self._loss_scale = loss_scale

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        self._leaves, self._step, self._train = leaves, step, train
        self._outcome = Outcome()
        self._step_key: Tensor | None = None
        self._stash: dict[Key, _ActivationStash] = {}
        self._second_halves: dict[Key, list[CallWithWeights]] = {}
        return self._outcome

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        piece = self._piece(key)
        program = piece.runnable.program
        # Every use is a leaf of its own: its gradient goes back on its own.
        inputs = [
            (port, values[port.value].detach().requires_grad_(self._train and port.grad))
            for port in program.inputs
        ]
        aliases = [self._alias(use.name) for use in program.tied]
        # A compiled stage has another program without gradients, which may draw other numbers.
        options = self._prepared.options
        graphless = piece.recompute and (options.backend is None or options.is_replayed)
        leaves = [leaf for _, leaf in inputs]
        again = piece.recompute and self._train
        state = [tensor.detach().clone() for tensor in piece.written] if again else []
        with torch.set_grad_enabled(self._train and not graphless), self._saving(piece, leaves):
            results = self._call(piece, key, leaves, aliases)
        outputs, loss = _outputs_and_loss(program, results)
        metrics = results[len(outputs) + program.has_loss :]
        numbers = dict(zip(program.metrics, metrics, strict=True))
        if loss is not None:
            numbers["loss"] = loss
        self._outcome.note(key, piece.weights, {name: n.detach() for name, n in numbers.items()})
        if self._train:
            kept = [] if piece.recompute else _ends(outputs)
            self._stash[key] = _ActivationStash(
                inputs, aliases, kept, None if piece.recompute else loss, _noted(piece), state
            )
        made = {port.value: out.detach() for port, out in outputs}
        if self._train:
            self._outcome.leaves(key, made.items(), is_gradient=False)
        return made

    def _piece(self, key: Key) -> _BatchSlice:
        if key not in self._pieces:
            start, stop = self._layout.slice(*key)
            split = key[0] in self._split
            runnable = self._prepared.runnable(key[0], stop - start, split=split)
            if isinstance(call := runnable.call, ReplayedCall):
                # All before anything travels: a recording must not wait for another rank.
                count = self._graph.num_microbatches(key[0])
                slices = (self._layout.slice(key[0], i) for i in range(count))
                alike = sum(b - a == stop - start for a, b in slices)
                call.reserve = min(self._graph.stages[key[0]].in_flight or alike, alike)
            self._pieces[key] = _BatchSlice(
                runnable,
                start,
                stop - start,
                self._prepared.captured.weights(stop - start, self._graph.batch_size),
                self._graph.stages[key[0]].recompute,
                gradient_ports(runnable.program.inputs),
                written_state(self._prepared.captured, runnable.program.module),
            )
        return self._pieces[key]

    def _saving(
        self, piece: _BatchSlice, arrived: Iterable[Tensor]
    ) -> AbstractContextManager[object]:
        if not (self._prepared.options.offload and self._train) or piece.recompute:
            return nullcontext()
        buffers = piece.runnable.program.module.buffers()
        return self._offload((*arrived, *buffers, *self._leaves.values()))

    def _call(
        self, piece: _BatchSlice, key: Key, inputs: list[Tensor], aliases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        runnable, start = piece.runnable, piece.start
        names = runnable.program.batch
        if not self._leaves.keys() >= set(names):
            programs = self._prepared.captured.programs
            self._leaves = programs.with_statistics(self._leaves, self._device)
        batch = [self._leaves[name].narrow(0, start, piece.count) for name in names]
        with self._prepared.compiling(key[0]):
            drawn = self._random(start) if runnable.by_sample else ()
            seed = hash((self._seed, self._step, start, key[0])) % 2**63  # one that torch takes
            with with_seed(seed, self._device) if runnable.is_random else nullcontext():
                return tuple(runnable.call(*drawn, *inputs, *aliases, *batch))

    def _random(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the key of the step and the first sample, on the device of the stage."""
        if self._step_key is None:
            number = step_key(self._seed, self._step)
            self._step_key = torch.full((), number, dtype=torch.int64, device=self._device)
        if start not in self._starts:
            self._starts[start] = torch.full((), start, dtype=torch.int64, device=self._device)
        return self._step_key, self._starts[start]

    def _alias(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return parameter.detach().requires_grad_(self._train and parameter.requires_grad)

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        stash = self._stash.pop(key)
        piece = self._piece(key)
        with self._prepared.compiling(key[0]):
            if piece.recompute:
                module = piece.runnable.program.module
                with unchanged_buffers(module), unchanged(piece.written):
                    put(piece.written, stash.state)
                    again = self._recompute(piece, key, stash)
                    returned = self._differentiate(piece, key, again, gradients)
                    if next(module.buffers(), None) is not None:
                        self.weight_gradients(key)  # autograd may have saved a buffer for them
            else:
                returned = self._differentiate(piece, key, stash, gradients)
        self._outcome.leaves(key, ((p.value, g) for p, g in returned.items()), is_gradient=True)
        return returned

    def _differentiate(
        self, piece: _BatchSlice, key: Key, stash: _ActivationStash, arrived: Mapping[Port, Tensor]
    ) -> dict[Port, Tensor]:
        ends, gradients = [], []
        for port, end in stash.outputs:
            if port in arrived:
                ends.append(end)
                gradients.append(arrived[port])
        if stash.loss is not None and stash.loss.requires_grad:
            ends.append(get_gradient_edge(stash.loss))
            scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
            gradients.append(torch.full_like(stash.loss, piece.weights["loss"] * scale))
        if ends and stash.calls:
            waiting = {p for call in stash.calls for p in call.parameters}
            inputs = [leaf for _, leaf in stash.leaves] + stash.aliases
            inputs += [p for p in piece.runnable.program.module.parameters() if p not in waiting]
            torch.autograd.backward(
                ends, gradients, retain_graph=True, inputs=[t for t in inputs if t.requires_grad]
            )
            self._second_halves[key] = stash.calls
        elif ends:
            torch.autograd.backward(ends, gradients)
        for use, alias in zip(piece.runnable.program.tied, stash.aliases, strict=True):
            if alias.grad is not None:
                self._outcome.tied[use.name, key[1], use.order] = alias.grad
        leaves = dict(stash.leaves)
        return {port: _gradient(leaves[port]) for port in piece.returned}

    def weight_gradients(self, key: Key) -> None:
        for call in self._second_halves.pop(key, ()):
            call.add_gradients()

    def _recompute(self, piece: _BatchSlice, key: Key, stash: _ActivationStash) -> _ActivationStash:
        """Repeat the forward, for its autograd graph."""
        results = self._call(piece, key, [leaf for _, leaf in stash.leaves], stash.aliases)
        outputs, loss = _outputs_and_loss(piece.runnable.program, results)
        return _ActivationStash(stash.leaves, stash.aliases, _ends(outputs), loss, _noted(piece))


def _noted(piece: _BatchSlice) -> list[CallWithWeights]:
    """Return the calls of the forward that ran last whose weights can wait."""
    notes = piece.runnable.notes
    return [] if notes is None else notes.take()


def _ends(outputs: list[tuple[Port, Tensor]]) -> list[tuple[Port, GradientEdge]]:
    """Return gradient edges of outputs, where a backward begins; outputs need not stay for it."""
    return [(port, get_gradient_edge(out)) for port, out in outputs if out.requires_grad]


def _outputs_and_loss(
    program: StageProgram, results: tuple[Tensor, ...]
) -> tuple[list[tuple[Port, Tensor]], Tensor | None]:
    count = len(program.outputs)
    outputs = list(zip(program.outputs, results[:count], strict=True))
    return outputs, results[count] if program.has_loss else None


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zero where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
