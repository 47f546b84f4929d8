"""Location of a number that is not finite: stage, micro-batch and tensor.

Every step checks the loss and, in one pass, all gradients of parameters. An infinity that a later
operation removes again, as in a mask, does no harm.

When all ranks know that a step was bad, most of its tensors are gone. The largest number of each
tensor between stages is kept (``Outcome.bad_values``). The first one in the step's order is named::

    stage 0   F0  F1  F2* F3          forward before backward, forwards along the stages,
    stage 1       F0  F1  F2* F3      backwards against them: 0F2 is the first
    backward                    B2*
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from anabranch.errors import NonFiniteError
from anabranch.graph.opgraph import BATCH
from anabranch.runtime.compute.outcome import GradientNorms, Outcome
from anabranch.runtime.ranks.placement import fetched
from anabranch.runtime.session import Session

_ACTIVATION, _LOSS, _GRADIENT, _PARAMETER = range(4)
_UNKNOWN = 2**31


class Finding(NamedTuple):
    """A tensor with numbers that are not finite; the least finding is the likeliest cause.

    Attributes:
        phase: 0 in a forward, 1 in a backward.
        place: the stage, in a backward its negative.
        microbatch: micro-batch of that stage; ``_UNKNOWN`` for the summed gradient of a parameter.
        what: kind of tensor.
        which: index of the value in the model's graph, or of the parameter from the last one.
    """

    phase: int
    place: int
    microbatch: int
    what: int
    which: int

    @property
    def stage(self) -> int:
        return abs(self.place)


_NOTHING = Finding(2, 0, 0, 0, 0)


def bad_names(gradients: Mapping[str, Tensor]) -> list[str]:
    """Return the names of gradients that are not finite, with one wait for the device."""
    norms = GradientNorms(gradients)
    return norms.bad(fetched(norms.tensors))


class Trace:
    """Finds the first numbers that are not finite; all ranks ask it together."""

    def __init__(self, session: Session) -> None:
        self._captured, self._stages = session.captured, session.graph.stages
        self._holders, self._mesh = session.holders, session.mesh
        # A backward begins with the last parameters.
        self._names = list(self._captured.parameters())[::-1]

    def error(
        self,
        outcome: Outcome,
        leaves: Mapping[str, Tensor],
        when: str,
        consequence: str,
        advice: str,
    ) -> NonFiniteError:
        """Return the error of a batch, the same on every rank.

        Args:
            outcome: results of this rank.
            consequence: words for the state of the parameters.
            advice: advice if the batch is not to blame.
        """
        firsts = self._mesh.gather(min(self._findings(outcome), default=_NOTHING))
        cause = min(Finding(*first) for first in firsts)
        text = self._describe(cause, when) + _in_batch(leaves)
        if cause.what == _LOSS and self._captured.programs.statistics:
            advice += ", or leave out batches whose labels are all ignored: no mean is of nothing"
        return NonFiniteError(f"{text}; {consequence}; {_data_advice(leaves, when) or advice}")

    def _findings(self, outcome: Outcome) -> list[Finding]:
        """Return the findings of this rank in a bad batch."""
        findings = [
            Finding(1, -stage, microbatch, _GRADIENT, value)
            if is_gradient
            else Finding(0, stage, microbatch, _ACTIVATION, value)
            for (stage, microbatch), value, is_gradient in outcome.bad_values
        ]
        if outcome.bad is not None:
            findings.append(Finding(0, *outcome.bad, _LOSS, -1))
        findings += [
            Finding(1, -self._stage_of(name), _UNKNOWN, _PARAMETER, self._names.index(name))
            for name in outcome.bad_parameters
        ]
        return findings

    def _stage_of(self, name: str) -> int:
        """Return the last stage of this rank that reads a parameter."""
        device, stages = self._mesh.device, self._holders.stages[name]
        return max(stage for stage in stages if device in self._stages[stage].devices)

    def _describe(self, cause: Finding, when: str) -> str:
        if cause == _NOTHING:
            return f"the gradient norm of {when} is not finite, though every gradient is"
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


def _data_advice(leaves: Mapping[str, Tensor], when: str) -> str:
    """Return advice if the batch itself is the cause, else empty; minus infinity may be a mask."""
    for leaf in leaves.values():
        harmful = leaf.isnan() | (leaf == math.inf)
        if harmful.any():
            return f"fix the data: {when}, sample {_first_sample(harmful)}"
    return ""


def _in_batch(leaves: Mapping[str, Tensor]) -> str:
    """Return words on the first sample of the batch that is not finite itself, or empty."""
    for name, leaf in leaves.items():
        if leaf.is_floating_point() and not leaf.isfinite().all():
            sample = _first_sample(~leaf.isfinite())
            return f"; {name} in the batch is not finite itself, first in sample {sample}"
    return ""


def _first_sample(bad: Tensor) -> int:
    return int(bad.reshape(bad.shape[0], -1).any(1).int().argmax())
