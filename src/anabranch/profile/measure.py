"""Measured seconds of every operator, forward and backward apart, on a real device.

One repeat is a training step, as a stage makes it: forward operator by operator, then one backward
through all of them. Autograd goes back from the last operator to the first, and a hook tells when
it arrives at the output of an operator::

    forward    |-- op 0 --|  |-- op 1 --|  |-- op 2 --|
    backward                 hook of 2 |-- op 2 --| hook of 1 |-- op 1 --| hook of 0 |-- op 0 --|

The sample counts take turns, so that a busy moment of the machine hits them alike, and the median
over the repeats drops it. A turn starts with an untimed step that fills the caches. Operators that
are alike pool their repeats: that lessens noise, and symmetrical branches stay symmetrical.

The share of a backward that gradients of weights take is measured as well: each turn ends with a
step whose backward leaves them out and takes as much less.

A stage is called once, but here each operator is. So the call of an operator that does nothing is
timed as well and subtracted. So is the time of a hook, for each value that has one: a loss has two
hooks, between which nothing happens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from anabranch.device import accelerator
from anabranch.errors import ProfileError, warn
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.weight_calls import waiting_bytes
from anabranch.graph.module_state import copied
from anabranch.graph.reverted import changing_state, unchanged, without_gradients
from anabranch.profile.operator_bytes import BytesObserver
from anabranch.profile.operator_clock import EventOperatorClock, OperatorClock
from anabranch.profile.operator_runner import (
    example_batch,
    likeness,
    operator_programs,
    run_operators,
    workable_counts,
)
from anabranch.profile.profile import OpCost, Profile, bytes_per_sample, fixed_bytes
from anabranch.profile.storages import TensorWatch

ProgressCallback = Callable[[int, int], None]

_CPU = torch.device("cpu")


def measure(
    captured: Captured,
    samples: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    device: str = "cpu",
    repeats: int = 9,
    budget_s: float = 60.0,
    threads: int | None = 1,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure the operators of a captured model.

    The user's model is left as it was: state, gradients and the random state come back.

    Args:
        captured: the model; its example batch is repeated or cut to each sample count.
        device: ``cpu``, or a GPU by torch's name, with an optional index; if the model is
            elsewhere, copies of the operators run there, which share one copy of the weights.
        repeats: timed steps per sample count, besides a first one.
        budget_s: seconds for everything. When they are spent, there are fewer repeats; sample
            counts that would not fit at all are left out, with a warning.
        threads: CPU threads, as many as each rank will have; ``None`` keeps PyTorch's setting.
        progress: called with (turns done, turns in all).

    Raises:
        CaptureError: if the model works with fewer than two of several sample counts.
        ProfileError: if the model has no numbers to compute with (it was built on the meta device).
        ValueError: for sample counts or repeats that are not positive, or another device.
    """
    counts = sorted(set(samples))
    if not counts or counts[0] < 1 or repeats < 0:
        raise ValueError(f"cannot measure {repeats} repeats at {counts} samples")
    torch_device = torch.device(device)
    if torch_device.type != "cpu" and not accelerator.has_streams(torch_device):
        raise ValueError(
            f"cannot measure on {device}; cpu and {accelerator.default_gpu()} are possible"
        )
    if any(t.is_meta for t in captured.module.state_dict(keep_vars=True).values()):
        raise ProfileError(
            "the model was built on the meta device, which has no numbers to compute with; "
            "build it on the CPU to measure it, or plan it by the data sheet of a GPU (plan "
            "--device v100 -o plan.json), which train takes (--plan plan.json) and makes the "
            "weights for, on every rank those of its own stages"
        )
    counts = workable_counts(captured, counts)
    if torch_device.type != "cpu" and not accelerator.count(torch_device.type):
        raise ProfileError(
            f"there is no {torch_device.type.upper()} device here to measure on; measure on the "
            "cpu, or estimate for a GPU with device v100, a100 or h100"
        )
    if torch_device.type != "cpu" and torch_device.index is None:
        torch_device = torch.device(torch_device.type, torch.accelerator.current_device_index())
    copies = _Copies(torch_device, captured.module)
    with _left_as_it_was(captured.module, torch_device, threads):
        deadline = time.perf_counter() + budget_s
        make = partial(_Bench, captured, copies=copies)
        benches = _take_turns(
            make, counts, repeats, deadline, progress or (lambda done, total: None)
        )
    return _profile(captured, benches, device)


class Measurement:
    """Measurement on the CPU in turns. The caller measures something else in between, so that
    changes in the speed of a shared machine affect both alike.

    Args:
        samples: sample counts with which the model works.
    """

    def __init__(self, captured: Captured, samples: Sequence[int]) -> None:
        self._captured = captured
        copies = _Copies(_CPU, captured.module)
        with _left_as_it_was(captured.module, _CPU):
            self._benches = [_Bench(captured, n, copies) for n in sorted(set(samples))]
            for bench in self._benches:
                bench.turn(0)
                bench.count_bytes()

    def turn(self) -> None:
        """Measure some steps at each sample count, with the number of threads that is set."""
        with _left_as_it_was(self._captured.module, _CPU):
            for bench in self._benches:
                bench.turn(_TURN)

    def profile(self) -> Profile:
        """Return the profile of the medians of all turns."""
        return _profile(self._captured, self._benches, "cpu")


class _Bench:
    """The operators at one sample count, and the seconds that they have taken so far."""

    def __init__(self, captured: Captured, samples: int, copies: _Copies) -> None:
        self.samples, self.device = samples, copies.device
        self.programs = operator_programs(captured, samples)
        self.batch = example_batch(captured, samples, self.device)
        self.modules = [copies.of(program.module) for program in self.programs]
        self.state = [copies.twins.get(tensor, tensor) for tensor in changing_state(captured)]
        self.clock = (
            EventOperatorClock(self.device)
            if accelerator.has_streams(self.device)
            else OperatorClock()
        )
        self.forward_s: list[list[float]] = [[] for _ in self.programs]
        self.backward_s: list[list[float]] = [[] for _ in self.programs]
        self.weight_shares: list[list[float]] = [[] for _ in self.programs]
        """Share of backwards that gradients of weights take, per operator and turn."""
        self.call_s: list[float] = []
        self.hook_s: list[float] = []
        self.hooks = [0] * len(self.programs)
        self.kept: list[int] = []
        self.working: list[int] = []
        self.waiting = [waiting_bytes(program) for program in self.programs]

    def count_bytes(self) -> None:
        """Run a step that counts kept and working bytes. Parameters have gradients already, so that
        a new gradient is freed when it has been added.
        """
        tensors = [t for m in self.modules for t in m.state_dict(keep_vars=True).values()]
        gradients = [t.grad for t in tensors if t.grad is not None and not t.grad.is_sparse]
        at_hand = [*tensors, *gradients, *self.batch.values()]
        nbytes = BytesObserver(len(self.programs), at_hand)
        with TensorWatch(nbytes.see), unchanged(self.state):
            run_operators(self.programs, self.batch, self._call, nbytes)
        self.kept, self.working = nbytes.kept, nbytes.working

    def turn(self, repeats: int) -> None:
        """Run steps from the same state: untimed, timed, one without gradients of weights."""
        with unchanged(self.state):
            self._steps(repeats)

    def _steps(self, repeats: int) -> None:
        for repeat in range(-1, repeats):
            forward, backward = self._timed_step()
            if repeat >= 0:
                self.call_s.append(forward.pop())
                self.hook_s.append(backward.pop())
                for op in range(len(self.programs)):
                    self.forward_s[op].append(forward[op])
                    self.backward_s[op].append(backward[op])
        if repeats:
            _, inputs = self._timed_step(inputs_alone=True)
            for op, shares in enumerate(self.weight_shares):
                whole = statistics.median(self.backward_s[op][-repeats:])
                shares.append(1 - inputs[op] / whole if whole else 0.0)

    def cost(self, alike: Sequence[int]) -> tuple[float, float, float]:
        """Seconds of operators that are alike: forward, backward, its part for weight gradients."""
        forward, backward, share = (
            statistics.median(s for op in alike for s in figures[op])
            for figures in (self.forward_s, self.backward_s, self.weight_shares)
        )
        hooks_s = statistics.median(self.hook_s) * self.hooks[alike[0]]
        forward = max(0.0, forward - statistics.median(self.call_s))
        whole = max(0.0, backward - hooks_s)
        return forward, whole, min(max(0.0, backward * share), whole)

    def _timed_step(self, *, inputs_alone: bool = False) -> tuple[list[float], list[float]]:
        self.clock.start(len(self.programs) + 1)
        self._step(inputs_alone=inputs_alone)
        return self.clock.stop()

    def _call(self, op: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = self.modules[op].forward(*inputs)
        return result

    def _step(self, *, inputs_alone: bool) -> None:
        """Run a forward and a backward, timed by operator.

        Args:
            inputs_alone: go back without gradients of weights, as far as the results of operators
                without inputs that require gradients.
        """
        values: dict[int, Tensor] = {}
        losses: list[Tensor] = []
        first: list[Tensor] = []
        with self.clock.forward(len(self.programs)):
            _NOTHING.forward()
        for op, program in enumerate(self.programs):
            inputs = [values[port.value] for port in program.inputs]
            inputs += [self.batch[name] for name in program.batch]
            with self.clock.forward(op):
                results = self._call(op, inputs)
            made = {p.value: t for p, t in zip(program.outputs, results, strict=False)}
            values |= made
            roots = list(made.values())
            if program.has_loss:
                roots.append(results[len(program.outputs)])
                losses += [loss for loss in roots[-1:] if loss.requires_grad]
            # A parameter's hook would be called while another operator goes back.
            hooked = [(op, root) for root in roots if not root.is_leaf]
            self.hooks[op] = len(hooked)
            if not any(tensor.requires_grad for tensor in inputs):
                first += [root for root in roots if root.requires_grad]
            if program.has_loss:  # between the two hooks of a loss nothing happens
                hooked = [*((len(self.programs), loss) for loss in losses[-1:]), *hooked]
            for arrives, root in hooked:
                root.register_hook(partial(self.clock.arrive, arrives))  # type: ignore[no-untyped-call]
        if losses and inputs_alone:
            torch.autograd.grad(losses, first, allow_unused=True)
        elif losses:
            torch.autograd.backward(losses)
        self.clock.leave()


_NOTHING = fx.GraphModule(nn.Module(), fx.Graph())


def _take_turns(
    make: Callable[[int], _Bench],
    counts: Sequence[int],
    repeats: int,
    deadline: float,
    progress: ProgressCallback,
) -> list[_Bench]:
    """Measure as many sample counts as the time allows, the smallest at least."""
    benches: list[_Bench] = []
    turns = -(-repeats // _TURN)
    step_s = 0.0
    for n in counts:
        # Three steps have to fit; each takes longer at most as the samples grow.
        expected = 3 * step_s * n / benches[-1].samples if benches else 0.0
        if benches and time.perf_counter() + expected > deadline:
            warn(
                f"{', '.join(map(str, counts[len(benches) :]))} samples were not measured, for "
                "want of time; raise the time budget or ask for smaller sample counts"
            )
            break
        benches.append(make(n))
        start = time.perf_counter()
        benches[-1].turn(1)
        step_s = (time.perf_counter() - start) / 3
        benches[-1].count_bytes()
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


def _profile(captured: Captured, benches: list[_Bench], device: str) -> Profile:
    first, last = benches[0], benches[-1]
    counts = first.samples, last.samples
    kept = bytes_per_sample(first.kept, last.kept, counts)
    fixed = fixed_bytes(first.kept, kept, first.samples)
    working = bytes_per_sample(first.working, last.working, counts)
    held = bytes_per_sample(first.waiting, last.waiting, counts)
    groups: dict[str, list[int]] = {}
    for i, step in enumerate(first.programs):
        groups.setdefault(likeness(captured, step, first.batch), []).append(i)
    costs: dict[int, OpCost] = {}
    weights = {parameter.name for parameter in captured.graph.parameters if parameter.trainable}
    for alike in groups.values():
        forward, backward, waiting = zip(*(bench.cost(alike) for bench in benches), strict=True)
        if weights.isdisjoint(captured.graph.ops[alike[0]].parameters):
            waiting = (0.0,) * len(benches)
        elif not captured.graph.gradient_targets[alike[0]]:
            waiting = backward
        costs |= {
            i: OpCost(forward, backward, kept[i], working[i], waiting, fixed[i], held[i])
            for i in alike
        }
    return Profile(
        captured.graph,
        tuple(b.samples for b in benches),
        tuple(costs[i] for i in range(len(captured.graph))),
        device=device,
        source="measured",
    )


class _Copies:
    """Copies of operators' programs on a device, with one copy of each tensor that is elsewhere."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device = device
        state = model.state_dict(keep_vars=True).values()
        self._needed = any(tensor.device != device for tensor in state)
        self.twins: dict[Tensor, Tensor] = {}

    def of(self, module: fx.GraphModule) -> fx.GraphModule:
        """Return the program on the device."""
        if not self._needed:
            return module
        program = copied(module, self.device, self.twins)
        for node in program.graph.nodes:
            # Tensors that the program constructs name their device: arange(..., device="cpu").
            node.args, node.kwargs = tree_map(
                lambda a: self.device if isinstance(a, torch.device) else a,
                (node.args, node.kwargs),
            )
        program.recompile()
        return program


@contextmanager
def _left_as_it_was(
    module: nn.Module, device: torch.device, threads: int | None = None
) -> Iterator[None]:
    """Context manager that pauses garbage collection, sets the number of threads and puts gradients
    aside; restores all of it and the random state.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    ungraded = without_gradients(module.parameters())
    gpus = [device] if accelerator.is_on_accelerator(device) else []
    collecting = gc.isenabled()
    gc.disable()
    try:
        with ungraded, torch.random.fork_rng(gpus, device_type=device.type), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads_before)
        if collecting:
            gc.enable()
