"""Worker: executes the actions of one device, in order, on tensors.

What a micro-batch needs between its forward and its backward waits in a stash::

    RF   receipt ---> parts                                        parts ---> receipt   RB
                        |                                            |
    F    assemble -> detached leaves -> program -> outputs      assemble -> gradients
                        |                             |              |
                        +----------- stash -----------+--- backward -+---> gradients of the leaves
                                                      |                              |
    SF                                           send parts                     send parts   SB

Autograd ends at the detached leaves, one per use of a value (``Port``), so each stage has a graph
of its own, and gradients cross as messages. Gradients of parameters accumulate in ``.grad`` over
the micro-batches, in their order.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from anabranch.graph.capture import Captured
from anabranch.graph.split import Port, Split, StageProgram
from anabranch.planner.stages import StageGraph
from anabranch.runtime.failure import POSITION
from anabranch.runtime.messages import TOKEN, Item, Layout, assemble, gradient_ports
from anabranch.runtime.transport import Receipt, Transport
from anabranch.schedule.schedule import Action, Kind, Schedule

_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
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


@dataclass
class _Stash:
    """One micro-batch between its forward and its backward."""

    leaves: list[tuple[Port, Tensor]]
    aliases: list[Tensor]
    outputs: list[tuple[Port, Tensor]]
    loss: Tensor | None


def executed(schedule: Schedule, graph: StageGraph, device: int) -> tuple[Action, ...]:
    """A device's actions without those on an empty slice of a short micro-batch."""
    result = []
    for action in schedule.actions.get(device, ()):
        replica = graph.stages[action.stage].devices.index(device)
        start, stop = graph.slice(action.stage, action.microbatch, replica)
        if start < stop:
            result.append(action)
    return tuple(result)


class Worker:
    """One device's part of one batch size.

    Args:
        captured: the model; its graph says which values are batched.
        split: the stages' programs.
        graph: stages and sample intervals.
        schedule: lowered.
        device: whose actions.
        transport: to the other ranks; None where there are none.
        rank_of: device -> rank.
        place: where the tensors live.
        seed: of random numbers (dropout). Each micro-batch of a stage draws from a generator of its
            own, a function of seed, step, samples and stage, so that a resumed run and a recomputed
            forward repeat it.
    """

    def __init__(
        self,
        captured: Captured,
        split: Split,
        graph: StageGraph,
        schedule: Schedule,
        device: int,
        transport: Transport | None,
        rank_of: Mapping[int, int],
        *,
        place: torch.device,
        seed: int = 0,
    ) -> None:
        self.graph = graph
        self.schedule = schedule
        self._transport = transport
        self._rank_of = rank_of
        self._place = place
        self._seed = seed
        self.layout = Layout(captured, split, graph, device)
        self.actions = executed(schedule, graph, device)
        self._slots = schedule.slots
        self._items = {a: self.layout.items(a) for a in self.actions if not a.kind.is_compute}
        self._parameters = {
            name: parameter
            for s in {a.stage for a in self.actions}
            for name, parameter in split.parameters(s).items()
        }

    def run(self, leaves: Mapping[str, Tensor], step: int, *, train: bool = True) -> Outcome:
        """Execute all actions once.

        Args:
            leaves: the whole batch, by the names of its leaves.
            step: number of the step, for messages and random numbers.
            train: False leaves out backwards, and gradients with them.

        Raises:
            PeerLostError: if another rank is gone.
        """
        return _Run(self, leaves, step, train).execute()


class _Run:
    """The mutable state of one execution: receipts, parts that have arrived, stashes."""

    def __init__(
        self, worker: Worker, leaves: Mapping[str, Tensor], step: int, train: bool
    ) -> None:
        self.worker = worker
        self.leaves = leaves
        self.step = step
        self.train = train
        self.outcome = Outcome()
        self.actions = [a for a in worker.actions if train or a.kind in _FORWARD_ONLY]
        self.receipts: dict[Action, Receipt] = {}
        self.completes: set[Action] = set()  # the last message of a channel's micro-batch
        self.channels: dict[tuple[int, int, int, Kind], deque[Action]] = defaultdict(deque)
        self.values: defaultdict[Key, dict[int, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.gradients: defaultdict[Key, dict[Port, list[tuple[Item, Tensor]]]] = defaultdict(dict)
        self.stash: dict[Key, _Stash] = {}
        self.made: dict[int, dict[int, Tensor]] = {}
        self.returned: dict[int, dict[Port, Tensor]] = {}

    def execute(self) -> Outcome:
        last: dict[tuple[object, int], Action] = {}
        for action in self.actions:
            if action.kind in _RECEIVES:
                self.channels[_channel(action)].append(action)
                last[_channel(action), action.microbatch] = action
        self.completes = set(last.values())
        for channel in self.channels.values():
            for _ in range(self.worker._slots):
                self.post(channel)
        for action in self.actions:
            POSITION.enter(self.step, action)
            start = time.perf_counter()
            _DO[action.kind](self, action)
            self.outcome.times.append((start, time.perf_counter()))
        POSITION.begin(self.step)
        if self.worker._transport is not None:
            self.worker._transport.flush()
        return self.outcome

    # Messages

    def post(self, channel: deque[Action]) -> None:
        """Post the receives of a channel's next micro-batch, which may come in several messages."""
        transport, worker = self.worker._transport, self.worker
        microbatch = channel[0].microbatch if channel else -1
        while channel and channel[0].microbatch == microbatch:
            action = channel.popleft()
            assert transport is not None
            rank, tag = worker._rank_of[action.peer], worker.layout.tag(action)
            specs = [(item.shape, item.dtype) for item in worker._items[action]]
            self.receipts[action] = transport.receive(specs, worker._place, rank, tag)

    def receive(self, action: Action) -> None:
        key = action.stage, action.microbatch
        tensors = self.receipts.pop(action).wait()
        for item, tensor in zip(self.worker._items[action], tensors, strict=True):
            if item is TOKEN:
                continue
            if item.port is None:
                self.values[key].setdefault(item.value, []).append((item, tensor))
            else:
                self.gradients[key].setdefault(item.port, []).append((item, tensor))
        if action in self.completes:
            self.post(self.channels[_channel(action)])

    def send(self, action: Action) -> None:
        transport, worker = self.worker._transport, self.worker
        assert transport is not None
        rank, tag = worker._rank_of[action.peer], worker.layout.tag(action)
        tensors = []
        for item in worker._items[action]:
            if item is TOKEN:
                whole = torch.zeros(item.shape, dtype=item.dtype)
            elif item.port is None:
                whole = self.made[action.stage][item.value]
            else:
                whole = self.returned[action.stage][item.port]
            tensors.append(item.part(whole))
        transport.send(tensors, rank, tag)

    # Compute

    def forward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        program = self.worker.layout.program(*key)
        arrived = {value: assemble(parts) for value, parts in self.values.pop(key, {}).items()}
        # Every use is a leaf of its own: its gradient goes back on its own.
        inputs = [
            (port, arrived[port.value].detach().requires_grad_(self.train and port.grad))
            for port in program.inputs
        ]
        recompute = self.worker.graph.stages[action.stage].recompute
        aliases = [self.alias(use.name) for use in program.tied]
        with torch.set_grad_enabled(self.train and not recompute):
            results = self.call(program, key, [leaf for _, leaf in inputs], aliases)
        count = len(program.outputs)
        outputs = list(zip(program.outputs, results[:count], strict=True))
        self.made[action.stage] = {port.value: out.detach() for port, out in outputs}
        loss = results[count] if program.has_loss else None
        self.note(program, key, loss, results[count + program.has_loss :])
        if self.train:
            kept = [] if recompute else outputs
            self.stash[key] = _Stash(inputs, aliases, kept, None if recompute else loss)

    def call(
        self, program: StageProgram, key: Key, inputs: list[Tensor], aliases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        worker = self.worker
        start, stop = worker.layout.slice(*key)
        batch = [self.leaves[name].narrow(0, start, stop - start) for name in program.batch]
        if not is_random(program.module):
            return tuple(program.module(*inputs, *aliases, *batch))
        with seeded(hash((worker._seed, self.step, start, key[0])) % _SEED_MODULUS, worker._place):
            return tuple(program.module(*inputs, *aliases, *batch))

    def alias(self, name: str) -> Tensor:
        parameter = self.worker._parameters[name]
        return parameter.detach().requires_grad_(self.train and parameter.requires_grad)

    def weight(self, key: Key) -> float:
        start, stop = self.worker.layout.slice(*key)
        return (stop - start) / self.worker.graph.batch_size

    def note(
        self, program: StageProgram, key: Key, loss: Tensor | None, metrics: tuple[Tensor, ...]
    ) -> None:
        """Add to the loss and the metrics of the step."""
        weight, outcome = self.weight(key), self.outcome
        if loss is not None:
            number = loss.item()
            if outcome.bad is None and not -float("inf") < number < float("inf"):
                outcome.bad = key
            outcome.loss += number * weight
        for name, metric in zip(program.metrics, metrics, strict=True):
            outcome.metrics[name] = outcome.metrics.get(name, 0.0) + metric.item() * weight

    def backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        stash = self.stash.pop(key)
        program = self.worker.layout.program(*key)
        if self.worker.graph.stages[action.stage].recompute:
            with unchanged_buffers(program.module):
                self.differentiate(program, key, self.recompute(program, key, stash))
        else:
            self.differentiate(program, key, stash)

    def differentiate(self, program: StageProgram, key: Key, stash: _Stash) -> None:
        stage, microbatch = key
        arrived = self.gradients.pop(key, {})
        tensors, gradients = [], []
        for port, output in stash.outputs:
            if port in arrived and output.requires_grad:
                tensors.append(output)
                gradients.append(assemble(arrived[port]))
        if stash.loss is not None and stash.loss.requires_grad:
            tensors.append(stash.loss)
            gradients.append(torch.full_like(stash.loss, self.weight(key)))
        if tensors:
            torch.autograd.backward(tensors, gradients)
        leaves = dict(stash.leaves)
        self.returned[stage] = {
            port: _gradient(leaves[port]) for port in gradient_ports(program.inputs)
        }
        for use, alias in zip(program.tied, stash.aliases, strict=True):
            if alias.grad is not None:
                self.outcome.tied[use.name, microbatch, use.order] = alias.grad

    def recompute(self, program: StageProgram, key: Key, stash: _Stash) -> _Stash:
        """The forward once more, for its autograd graph."""
        results = self.call(program, key, [leaf for _, leaf in stash.leaves], stash.aliases)
        count = len(program.outputs)
        outputs = list(zip(program.outputs, results[:count], strict=True))
        loss = results[count] if program.has_loss else None
        return _Stash(stash.leaves, stash.aliases, outputs, loss)


_DO = {
    Kind.FORWARD: _Run.forward,
    Kind.BACKWARD: _Run.backward,
    Kind.SEND_FORWARD: _Run.send,
    Kind.SEND_BACKWARD: _Run.send,
    Kind.RECEIVE_FORWARD: _Run.receive,
    Kind.RECEIVE_BACKWARD: _Run.receive,
}
_FORWARD_ONLY = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


def _channel(action: Action) -> tuple[int, int, int, Kind]:
    return action.stage, action.peer_stage, action.peer, action.kind


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
