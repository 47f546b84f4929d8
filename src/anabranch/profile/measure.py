"""Measured seconds of every operator, forward and backward apart, on a real device.

One repeat is a training step, operator by operator (``operator_runner``). The sample counts take
turns, so that a busy moment of the machine hits them alike, and the median over the repeats drops
it. A turn starts with an untimed step that fills the caches. Operators that are alike pool their
repeats: less noise, and what is symmetrical stays so.

A stage enters autograd once, here each operator does. Entering is timed as well, on an operator
that does nothing, and taken off.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from anabranch.errors import ProfileError
from anabranch.graph.capture import Captured
from anabranch.graph.split import StageProgram
from anabranch.profile.kept_bytes import KeptBytes
from anabranch.profile.operator_runner import (
    example_batch,
    operator_programs,
    run_operators,
    workable_counts,
)
from anabranch.profile.profile import OpCost, Profile, kept_per_sample

Progress = Callable[[int, int], None]


def measure(
    captured: Captured,
    samples: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    device: str = "cpu",
    repeats: int = 9,
    budget_s: float = 60.0,
    threads: int | None = 1,
    pool: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measure the operators of a captured model.

    The user's model is left as it was: buffers, gradients and the random state come back.

    Args:
        captured: the model; its example batch is repeated or cut to each sample count.
        device: ``cpu``, or ``cuda`` with an optional index; if the model is elsewhere, copies of
            the operators run there, which share one copy of the weights.
        repeats: timed steps per sample count, besides a first one.
        budget_s: seconds for everything. When they are spent, fewer repeats have to do; sample
            counts that would not fit at all are left out, with a warning.
        threads: CPU threads, as many as each rank will have; ``None`` keeps PyTorch's setting.
        pool: whether operators with the same operations and shapes share their repeats.
        progress: called with (turns done, turns in all).

    Raises:
        CaptureError: if that leaves less than two.
        ProfileError: if the model has no numbers to compute with (it was built on the meta device).
        ValueError: for sample counts or repeats that are not positive, or another device.
    """
    counts = sorted(set(samples))
    if not counts or counts[0] < 1 or repeats < 0:
        raise ValueError(f"cannot measure {repeats} repeats at {counts} samples")
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot measure on {device}; cpu and cuda are possible")
    if any(t.is_meta for t in captured.module.state_dict(keep_vars=True).values()):
        raise ProfileError(
            "the model was built on the meta device, which has no numbers to compute with; "
            "build it on the CPU to measure it, or estimate it for a GPU"
        )
    counts = workable_counts(captured, counts)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError(
            "there is no CUDA device here to measure on; measure on the cpu, or estimate for a GPU "
            "with device v100, a100 or h100"
        )
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    copies = _Copies(place, captured.module)
    with _left_as_it_was(captured.module, place), _threads(threads):
        deadline = time.perf_counter() + budget_s
        make = partial(_Bench, captured, copies=copies)
        benches = _take_turns(
            make, counts, repeats, deadline, progress or (lambda done, total: None)
        )
    return _profile(captured, benches, device, pool)


class _Bench:
    """The operators at one sample count, and the seconds that they have taken so far."""

    def __init__(self, captured: Captured, samples: int, copies: _Copies) -> None:
        self.samples, self.device = samples, copies.device
        self.programs = operator_programs(captured, samples)
        self.batch = example_batch(captured, samples, self.device)
        self.modules = [copies.of(program.module) for program in self.programs]
        self.clock = _CudaClock(self.device) if self.device.type == "cuda" else _Clock()
        self.forward_s: list[list[float]] = [[] for _ in self.programs]
        self.backward_s: list[list[float]] = [[] for _ in self.programs]
        self.entry_s: list[float] = []
        self.kept: list[int] = []

    def first(self) -> None:
        """The first step, which counts what autograd keeps."""
        tensors = [t for m in self.modules for t in m.state_dict(keep_vars=True).values()]
        watch = KeptBytes(len(self.programs), [*tensors, *self.batch.values()])
        run_operators(self.programs, self.batch, self._call, watch)
        self.kept = watch.nbytes

    def turn(self, repeats: int) -> None:
        """One untimed step, then timed ones."""
        for repeat in range(-1, repeats):
            self.clock.start(len(self.programs) + 1)
            run_operators(self.programs, self.batch, self._call, self.clock)
            self._enter()
            forward, backward = self.clock.stop()
            if repeat >= 0:
                self.entry_s.append(backward.pop())
                for op in range(len(self.programs)):
                    self.forward_s[op].append(forward[op])
                    self.backward_s[op].append(backward[op])

    def cost(self, alike: Sequence[int]) -> tuple[float, float]:
        """Forward and backward seconds of operators that are alike."""
        forward = statistics.median(s for op in alike for s in self.forward_s[op])
        backward = statistics.median(s for op in alike for s in self.backward_s[op])
        return forward, max(0.0, backward - statistics.median(self.entry_s))

    def _call(self, op: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = self.modules[op].forward(*inputs)
        return result

    def _enter(self) -> None:
        leaf = torch.zeros((), device=self.device, requires_grad=True)
        root, grad = leaf.view(()), torch.zeros_like(leaf)
        with self.clock.backward(len(self.programs)):
            torch.autograd.backward([root], [grad])


def _take_turns(
    make: Callable[[int], _Bench],
    counts: Sequence[int],
    repeats: int,
    deadline: float,
    progress: Progress,
) -> list[_Bench]:
    """Measure as many sample counts as the time allows, the smallest at least."""
    benches: list[_Bench] = []
    turns = -(-repeats // _TURN)
    step_s = 0.0
    for n in counts:
        # Three steps have to fit; each takes longer at most as the samples grow.
        expected = 3 * step_s * n / benches[-1].samples if benches else 0.0
        if benches and time.perf_counter() + expected > deadline:
            warnings.warn(
                f"{', '.join(map(str, counts[len(benches) :]))} samples were not measured, for "
                "want of time; raise the time budget or ask for smaller sample counts",
                stacklevel=3,
            )
            break
        benches.append(make(n))
        benches[-1].first()
        start = time.perf_counter()
        benches[-1].turn(1)
        step_s = (time.perf_counter() - start) / 2
        progress(len(benches), len(counts) * (1 + turns))
    for turn in range(turns):
        for i, bench in enumerate(benches):
            if time.perf_counter() > deadline:
                return benches
            bench.turn(_TURN)
            progress(len(benches) * (turn + 1) + i + 1, len(benches) * (1 + turns))
    return benches


_TURN = 3
"""Timed steps in a row."""


class _Clock:
    """Observes seconds on the CPU."""

    def start(self, num_ops: int) -> None:
        self.forward_s = [0.0] * num_ops
        self.backward_s = [0.0] * num_ops

    def forward(self, op: int) -> AbstractContextManager[None]:
        return self._between(self.forward_s, op)

    def backward(self, op: int) -> AbstractContextManager[None]:
        return self._between(self.backward_s, op)

    @contextmanager
    def _between(self, seconds: list[float], op: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[op] = time.perf_counter() - start

    def made(self, op: int, outputs: Sequence[Tensor]) -> None:
        pass

    def stop(self) -> tuple[list[float], list[float]]:
        return self.forward_s, self.backward_s


class _CudaClock(_Clock):
    """Observes seconds on a GPU: events in its queue, read when it has caught up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, num_ops: int) -> None:
        super().start(num_ops)
        self.events: list[tuple[list[float], int, torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize(self.device)

    @contextmanager
    def _between(self, seconds: list[float], op: int) -> Iterator[None]:
        event = partial(torch.cuda.Event, enable_timing=True)
        start, end = event(), event()
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        yield
        end.record(stream)
        self.events.append((seconds, op, start, end))

    def stop(self) -> tuple[list[float], list[float]]:
        torch.cuda.synchronize(self.device)
        for seconds, op, start, end in self.events:
            seconds[op] = start.elapsed_time(end) / 1e3
        return super().stop()


def _profile(captured: Captured, benches: list[_Bench], device: str, pool: bool) -> Profile:
    first, last = benches[0], benches[-1]
    kept = kept_per_sample(first.kept, last.kept, (first.samples, last.samples))
    groups: dict[str, list[int]] = {}
    for i, step in enumerate(first.programs):
        key = _likeness(captured, step, first.batch) if pool else str(i)
        groups.setdefault(key, []).append(i)
    costs: dict[int, OpCost] = {}
    for alike in groups.values():
        forward, backward = zip(*(bench.cost(alike) for bench in benches), strict=True)
        costs |= {i: OpCost(forward, backward, kept[i]) for i in alike}
    return Profile(
        replace(captured.graph, granularity=captured.granularity),
        tuple(b.samples for b in benches),
        tuple(costs[i] for i in range(len(captured.graph))),
        device=device,
        source="measured",
    )


def _likeness(captured: Captured, step: StageProgram, batch: Mapping[str, Tensor]) -> str:
    """Equal for operators that do the same: operations, shapes, which tensors need a gradient."""
    graph: fx.Graph = step.module.graph
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    state = step.module.state_dict(keep_vars=True)
    values = captured.graph.values
    lines = [f"{step.shapes[port.value]} {values[port.value].grad}" for port in step.inputs]
    lines += [f"{batch[name].dtype} {batch[name].shape}" for name in step.batch]
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        what: object = node.target
        if node.op == "placeholder":
            what = ""
        elif node.op == "get_attr" and node.target in state:
            tensor = state[node.target]
            what = tensor.dtype, tuple(tensor.shape), tensor.requires_grad
        lines.append(f"{node.op} {what} {args}")
    return "\n".join(lines)


class _Copies:
    """Operators' programs on a device, with one copy of each tensor that is not there already."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device = device
        state = model.state_dict(keep_vars=True).values()
        self._needed = any(tensor.device != device for tensor in state)
        self._twins: dict[Tensor, Tensor] = {}

    def of(self, module: fx.GraphModule) -> fx.GraphModule:
        """The program on the device."""
        if not self._needed:
            return module
        tensors = module.state_dict(keep_vars=True).values()
        copied = copy.deepcopy(module, {id(tensor): self._twin(tensor) for tensor in tensors})
        for node in copied.graph.nodes:
            # Tensors that the program constructs name their device: arange(..., device="cpu").
            node.args, node.kwargs = tree_map(
                lambda a: self.device if isinstance(a, torch.device) else a,
                (node.args, node.kwargs),
            )
        copied.recompile()
        return copied

    def _twin(self, tensor: Tensor) -> Tensor:
        if tensor not in self._twins:
            twin = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            self._twins[tensor] = twin
        return self._twins[tensor]


@contextmanager
def _left_as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    gpus = [device] if device.type == "cuda" else []
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.random.fork_rng(gpus), torch.enable_grad():
            yield
    finally:
        if collecting:
            gc.enable()
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
