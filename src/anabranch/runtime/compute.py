"""Compute: what a rank does with one micro-batch of a stage, between two messages.

::

    forward    values  -> detached leaves -> program -> outputs         gradients    backward
                               |                          |                 |
                               +--------- stash ----------+---- autograd ---+--> gradients of leaves

Autograd ends at the detached leaves, one per use of a value (``Port``), so each stage has a graph
of its own, and gradients cross as messages. Gradients of parameters accumulate in ``.grad`` over
the micro-batches, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from anabranch.graph.split import Port, StageProgram
from anabranch.planner.stages import StageGraph
from anabranch.runtime.messages import Layout, gradient_ports

_SEED_MODULUS = 2**63

Key = tuple[int, int]
"""Stage and micro-batch."""


@dataclass
class Outcome:
    """What a device found out in one step.

    Attributes:
        loss: its share of the step's loss, weighted by samples.
        metrics: its shares of the metrics, likewise.
        bad: stage and first micro-batch with a loss that is not finite, or None.
        times: start and end of every action, in the clock of ``time.perf_counter``.
        tied: exact mode: (parameter, micro-batch, order) -> gradient of one use.
    """

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    bad: Key | None = None
    times: list[tuple[float, float]] = field(default_factory=list)
    tied: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)


class Compute(Protocol):
    """What a worker asks for between messages."""

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        """Start a step.

        Args:
            leaves: the whole batch, by the names of its leaves.
            step: its number.
            train: whether backwards will follow.

        Returns:
            What ``forward`` and ``backward`` will add to.
        """
        ...

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Compute the values that leave a stage from those that enter it."""
        ...

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        """Compute the gradients of what entered from those of what left."""
        ...


@dataclass
class _Stash:
    """One micro-batch between its forward and its backward."""

    leaves: list[tuple[Port, Tensor]]
    aliases: list[Tensor]
    outputs: list[tuple[Port, Tensor]]
    loss: Tensor | None


class StageCompute:
    """Runs the stages' programs of one device under autograd.

    Args:
        layout: programs and samples of every micro-batch.
        graph: the stages.
        parameters: of this device's stages, by name.
        place: where the tensors live.
        seed: of random numbers (dropout). Each micro-batch of a stage draws from a generator of its
            own, a function of seed, step, samples and stage, so that a resumed run and a recomputed
            forward repeat it.
    """

    def __init__(
        self,
        layout: Layout,
        graph: StageGraph,
        parameters: Mapping[str, nn.Parameter],
        *,
        place: torch.device,
        seed: int = 0,
    ) -> None:
        self._layout, self._graph, self._parameters = layout, graph, parameters
        self._place, self._seed = place, seed

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        """See ``Compute``."""
        self._leaves, self._step, self._train = leaves, step, train
        self._outcome = Outcome()
        self._stash: dict[Key, _Stash] = {}
        return self._outcome

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """See ``Compute``."""
        program = self._layout.program(*key)
        # Every use is a leaf of its own: its gradient goes back on its own.
        inputs = [
            (port, values[port.value].detach().requires_grad_(self._train and port.grad))
            for port in program.inputs
        ]
        recompute = self._graph.stages[key[0]].recompute
        aliases = [self._alias(use.name) for use in program.tied]
        with torch.set_grad_enabled(self._train and not recompute):
            results = self._call(program, key, [leaf for _, leaf in inputs], aliases)
        count = len(program.outputs)
        outputs = list(zip(program.outputs, results[:count], strict=True))
        loss = results[count] if program.has_loss else None
        self._note(program, key, loss, results[count + program.has_loss :])
        if self._train:
            kept = [] if recompute else outputs
            self._stash[key] = _Stash(inputs, aliases, kept, None if recompute else loss)
        return {port.value: out.detach() for port, out in outputs}

    def _call(
        self, program: StageProgram, key: Key, inputs: list[Tensor], aliases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        start, stop = self._layout.slice(*key)
        batch = [self._leaves[name].narrow(0, start, stop - start) for name in program.batch]
        if not is_random(program.module):
            return tuple(program.module(*inputs, *aliases, *batch))
        with seeded(hash((self._seed, self._step, start, key[0])) % _SEED_MODULUS, self._place):
            return tuple(program.module(*inputs, *aliases, *batch))

    def _alias(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return parameter.detach().requires_grad_(self._train and parameter.requires_grad)

    def _weight(self, key: Key) -> float:
        start, stop = self._layout.slice(*key)
        return (stop - start) / self._graph.batch_size

    def _note(
        self, program: StageProgram, key: Key, loss: Tensor | None, metrics: tuple[Tensor, ...]
    ) -> None:
        """Add to the loss and the metrics of the step."""
        weight, outcome = self._weight(key), self._outcome
        if loss is not None:
            number = loss.item()
            if outcome.bad is None and not -float("inf") < number < float("inf"):
                outcome.bad = key
            outcome.loss += number * weight
        for name, metric in zip(program.metrics, metrics, strict=True):
            outcome.metrics[name] = outcome.metrics.get(name, 0.0) + metric.item() * weight

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        """See ``Compute``."""
        stash = self._stash.pop(key)
        program = self._layout.program(*key)
        if self._graph.stages[key[0]].recompute:
            with unchanged_buffers(program.module):
                again = self._recompute(program, key, stash)
                return self._differentiate(program, key, again, gradients)
        return self._differentiate(program, key, stash, gradients)

    def _differentiate(
        self, program: StageProgram, key: Key, stash: _Stash, arrived: Mapping[Port, Tensor]
    ) -> dict[Port, Tensor]:
        tensors, gradients = [], []
        for port, output in stash.outputs:
            if port in arrived and output.requires_grad:
                tensors.append(output)
                gradients.append(arrived[port])
        if stash.loss is not None and stash.loss.requires_grad:
            tensors.append(stash.loss)
            gradients.append(torch.full_like(stash.loss, self._weight(key)))
        if tensors:
            torch.autograd.backward(tensors, gradients)
        for use, alias in zip(program.tied, stash.aliases, strict=True):
            if alias.grad is not None:
                self._outcome.tied[use.name, key[1], use.order] = alias.grad
        leaves = dict(stash.leaves)
        return {port: _gradient(leaves[port]) for port in gradient_ports(program.inputs)}

    def _recompute(self, program: StageProgram, key: Key, stash: _Stash) -> _Stash:
        """The forward once more, for its autograd graph."""
        results = self._call(program, key, [leaf for _, leaf in stash.leaves], stash.aliases)
        count = len(program.outputs)
        outputs = list(zip(program.outputs, results[:count], strict=True))
        loss = results[count] if program.has_loss else None
        return _Stash(stash.leaves, stash.aliases, outputs, loss)


def _gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf; zero where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def is_random(module: nn.Module) -> bool:
    """Whether a stage draws random numbers; known once per module."""
    cached = module.__dict__.get("_anabranch_is_random")
    if cached is None:
        cached = any(_draws(node) for node in module.graph.nodes)  # type: ignore[union-attr]
        module.__dict__["_anabranch_is_random"] = cached
    return bool(cached)


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers; dropout with probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    given |= node.kwargs
    return not any(given.get(name) == 0 for name in ("p", "dropout_p"))


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Put buffers back that change inside, such as running means; no autograd graph may be alive
    after it.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def seeded(seed: int, place: torch.device) -> Iterator[None]:
    """Draw from a generator of its own, and leave the user's where it was: data loaders draw from
    it on every rank.
    """
    devices = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
