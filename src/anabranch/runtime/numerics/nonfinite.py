"""The origin of a number that is not finite: stage, micro-batch and tensor.

Every step looks at the loss and, in one pass, at all gradients of parameters. An infinity that a
later operation takes away again, as in a mask, does no harm.

By the time that the harm is known on all ranks, most tensors of the step are gone. What is left of
those between stages are their largest numbers (``Outcome.bad_values``), which tell of what was bad
in this step, even if it would not be so again. For the rest the step runs once more, with the same
random numbers and no update, and every tensor is looked at as it leaves its stage::

    stage 0   F0  F1  F2* F3          forward before backward, forwards along the stages,
    stage 1       F0  F1  F2* F3      backwards against them: 0F2 is the first
    backward                    B2*

Minus infinity in an activation may be a mask that the next stage applies. It is named only as what
came before something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anabranch.errors import NonFiniteError
from anabranch.graph.capture import Captured
from anabranch.graph.opgraph import BATCH
from anabranch.graph.split import Port
from anabranch.runtime.compute.stage_compute import Compute, Key, Outcome, unchanged_buffers
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.placement import fetched
from anabranch.runtime.worker import Worker

_BEFORE = "no parameter was changed in this step"
_AFTER = (
    "other stages may have been updated by then, since steps follow each other without waiting: "
    "resume from a checkpoint"
)

_ONCE = (
    "the same step, run again, is finite, so an operation does not do the same twice, or memory or "
    "a device was at fault"
)
_LOWER = "lower the learning rate, or set clip_norm"
_IF_AGAIN = "if that comes again on the same rank, replace its device"

_MASK, _ACTIVATION, _LOSS, _GRADIENT, _PARAMETER = range(5)
_UNKNOWN = 2**31


class Finding(NamedTuple):
    """Numbers that are not finite, in one place; findings sort by what may be the cause of what.

    Attributes:
        phase: 0 in a forward, 1 in a backward.
        place: the stage, in a backward its negative.
        microbatch: of that stage; a large number where it is not known.
        what: kind of tensor.
        which: of the value in the model's graph, or of the parameter, from the last one.
    """

    phase: int
    place: int
    microbatch: int
    what: int
    which: int

    @property
    def stage(self) -> int:
        """Where it was."""
        return abs(self.place)


_NOTHING = Finding(2, 0, 0, 0, 0)


def _causes(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.what != _MASK]


def _masks(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.what == _MASK]


def _between_stages(outcome: Outcome) -> Iterator[Finding]:
    """What a step has kept of what left its stages, and its losses."""
    for (stage, microbatch), value, is_gradient in outcome.bad_values:
        if is_gradient:
            yield Finding(1, -stage, microbatch, _GRADIENT, value)
        else:
            yield Finding(0, stage, microbatch, _ACTIVATION, value)
    if outcome.bad is not None:
        yield Finding(0, *outcome.bad, _LOSS, -1)


def bad_names(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of gradients that are not finite: one pass over all, and one wait for the device."""
    values_of = {name: g._values() if g.is_sparse else g for name, g in gradients.items()}
    # A norm may overflow though the numbers do not, so whatever looks bad is looked at again.
    if all(map(math.isfinite, fetched(norms(values_of.values())))):
        return []
    return [name for name, values in values_of.items() if not _is_finite(values)]


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sums of norms, one for all tensors of a device and type; finite if all tensors are, unless
    numbers are very large.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [torch.stack(torch._foreach_norm(group)).sum() for group in groups.values()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class Ran:
    """A step that has run."""

    worker: Worker
    leaves: Mapping[str, Tensor]
    step: int
    outcome: Outcome


class Trace:
    """Finds the first numbers that are not finite; all ranks ask it together."""

    def __init__(
        self, captured: Captured, parameters: Mapping[str, nn.Parameter], mesh: Mesh
    ) -> None:
        self._captured, self._parameters, self._mesh = captured, parameters, mesh
        names = [name for name, _ in captured.module.named_parameters()]
        # Backward comes to the last parameters first.
        self._index = {name: i for i, name in enumerate(reversed(names))}
        self._names = tuple(reversed(names))

    def why(self, ran: Ran, *, is_first: bool) -> NonFiniteError:
        """The error to raise on every rank; gradients are gone afterwards."""
        seen, again = [*self._seen(ran)], self._again(ran)
        found = [*seen, *again]
        cause, mask, repeated = self._first(_causes(found), _masks(found), _causes(again))
        if cause == _NOTHING:
            text = f"the gradient norm of step {ran.step} is not finite, though every gradient is"
        else:
            text = self._describe(cause, f"step {ran.step}")
        if mask < cause and mask != _NOTHING:
            text += (
                f"; before it, stage {mask.stage} had minus infinity in {self._value(mask.which)}"
            )
        text += _in_batch(ran.leaves)
        advice = data_advice(ran.leaves, f"step {ran.step}") or _LOWER
        if repeated == _NOTHING and cause != _NOTHING:
            text, advice = f"{text}; {_ONCE}", _IF_AGAIN
        done = _BEFORE if is_first else _AFTER
        return NonFiniteError(f"{text}; {done}; {advice}")

    def seen(self, stage: int, outcome: Outcome) -> list[Finding]:
        """What a bad batch of a stage shows without running it again."""
        bad = [self._parameter(stage, name) for name in outcome.bad_parameters]
        return [*_between_stages(outcome), *bad]

    def _parameter(self, stage: int, name: str) -> Finding:
        return Finding(1, -stage, _UNKNOWN, _PARAMETER, self._index[name])

    def told(self, found: Iterable[Finding], leaves: Mapping[str, Tensor], when: str) -> str:
        """What all ranks have ``seen`` first, as text that is the same on every rank."""
        (cause,) = self._first(_causes(found))
        return self._describe(cause, when) + _in_batch(leaves)

    def _first(self, *groups: Iterable[Finding]) -> list[Finding]:
        """The first finding of each group, of all ranks."""
        mine = torch.tensor([min(group, default=_NOTHING) for group in groups])
        gathered = [rows.tolist() for rows in self._mesh.all_gather(mine)]
        return [min(Finding(*rows[i]) for rows in gathered) for i in range(len(groups))]

    def _seen(self, ran: Ran) -> Iterator[Finding]:
        """What the step itself has shown."""
        yield from _between_stages(ran.outcome)
        for name in ran.outcome.bad_parameters:
            yield self._parameter(self._stage(name, ran.worker), name)

    def _stage(self, name: str, worker: Worker) -> int:
        """The last stage of this rank that reads a parameter."""
        stages = {action.stage: action.microbatch for action in worker.actions}
        reads = (
            stage
            for stage, microbatch in sorted(stages.items(), reverse=True)
            if name in dict(worker.layout.program(stage, microbatch).module.named_parameters())
        )
        return next(reads, max(stages, default=0))

    def _again(self, ran: Ran) -> list[Finding]:
        self._clear()
        probes: list[_Probe] = []

        def probed(compute: Compute) -> Compute:
            probes.append(_Probe(compute, self._parameters, self._index))
            return probes[0]

        # As in recomputation, what a forward changes besides must not change twice.
        with unchanged_buffers(self._captured.module):
            ran.worker.through(probed).run(ran.leaves, ran.step)
        self._clear()
        return probes[0].found

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _describe(self, cause: Finding, when: str) -> str:
        if cause.what == _LOSS:
            what = "the loss"
        elif cause.what == _PARAMETER:
            what = f"the gradient of parameter {self._names[cause.which]}"
        else:
            what = self._value(cause.which)
            if cause.what == _GRADIENT:
                what = f"the gradient of {what}"
        where = f"stage {cause.stage}, micro-batch {cause.microbatch} is the first"
        if cause.microbatch == _UNKNOWN:
            where = f"stage {cause.stage} is the first, over all its micro-batches"
        return f"{what} is not finite in {when}: {where}"

    def _value(self, index: int) -> str:
        value = self._captured.graph.values[index]
        ops, producer = self._captured.graph.ops, value.producer
        origin = "the batch" if producer == BATCH else ops[producer].name
        return f"the activation {value.name} of {origin}"


class _Probe:
    """A ``Compute`` that looks at everything that another one makes."""

    def __init__(
        self, compute: Compute, parameters: Mapping[str, nn.Parameter], index: Mapping[str, int]
    ) -> None:
        self.found: list[Finding] = []
        self._compute, self._parameters, self._index = compute, parameters, index
        self._known: set[object] = set()

    def begin(self, leaves: Mapping[str, Tensor], step: int, *, train: bool) -> Outcome:
        self._outcome = self._compute.begin(leaves, step, train=train)
        return self._outcome

    def forward(self, key: Key, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        made = self._compute.forward(key, values)
        for value, tensor in made.items():
            if tensor.is_floating_point() and not _is_finite(tensor):
                what = _ACTIVATION if _is_harmful(tensor) else _MASK
                self.found.append(Finding(0, *key, what, value))
        if self._outcome.bad == key:
            self.found.append(Finding(0, *key, _LOSS, -1))
        return made

    def backward(self, key: Key, gradients: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        returned = self._compute.backward(key, gradients)
        stage, microbatch = key
        for port, tensor in returned.items():
            if not _is_finite(tensor):
                self.found.append(Finding(1, -stage, microbatch, _GRADIENT, port.value))
        mine: dict[object, tuple[str, Tensor]] = {
            name: (name, p.grad) for name, p in self._parameters.items() if p.grad is not None
        }
        mine |= {use: (use[0], gradient) for use, gradient in self._outcome.tied.items()}
        for which, (name, tensor) in mine.items():
            # Gradients add up, so what has been bad once stays so.
            if which not in self._known and bad_names({name: tensor}):
                self._known.add(which)
                index = self._index[name]
                self.found.append(Finding(1, -stage, microbatch, _PARAMETER, index))
        return returned


def _is_harmful(tensor: Tensor) -> bool:
    """Whether there is more than minus infinity."""
    return bool(_harmful(tensor).any())


def _harmful(tensor: Tensor) -> Tensor:
    return torch.isnan(tensor) | (tensor == float("inf"))


def data_advice(leaves: Mapping[str, Tensor], when: str) -> str:
    """Advice where the batch itself is the cause, else empty; minus infinity may be a mask."""
    for leaf in leaves.values():
        if leaf.is_floating_point() and _is_harmful(leaf):
            return f"fix the data: {when}, sample {_first_sample(_harmful(leaf))}"
    return ""


def _in_batch(leaves: Mapping[str, Tensor]) -> str:
    """The first sample of the batch that is bad itself, as text."""
    for name, leaf in leaves.items():
        if leaf.is_floating_point() and not _is_finite(leaf):
            sample = _first_sample(~torch.isfinite(leaf))
            return f"; {name} in the batch is not finite itself, first in sample {sample}"
    return ""


def _first_sample(bad: Tensor) -> int:
    return int(bad.reshape(bad.shape[0], -1).any(1).int().argmax())
