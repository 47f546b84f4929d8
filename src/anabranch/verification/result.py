"""Result of a comparison of a pipeline with one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.errors import TrainingError, some
from anabranch.graph.capture import Captured
from anabranch.graph.flat_program import gradient_types
from anabranch.graph.loss_kinds import SENTENCES, LossKind
from anabranch.graph.slices import in_slices, view_named
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.reference import ROUNDING, Reference, largest_distance

SLICES, WHOLE = "the module on the same micro-batches", "the module on the whole batch"
CAPTURED = "the captured model, which draws the same random numbers"
SAME_STAGES = "the captured model on the same micro-batches"


@dataclass(frozen=True)
class VerifyResult:
    """Result of a comparison.

    Attributes:
        loss, reference_loss: loss of the pipeline and of one process.
        max_gradient_error: largest over the parameters of max|a - b| / max|b|. |b| counts as at
            least a hundredth of the largest gradient: some gradients are zero but for rounding,
            such as that of an attention's key bias, or of a bias before batch normalisation.
        worst: parameter with this error.
        bitwise: loss and all gradients are equal in every bit.
        exact: the pipeline ran in the mode in which they have to be bitwise equal.
        num_parameters: number of parameters that were compared.
        num_devices: ranks of the pipeline.
        is_random: the model draws random numbers, and the pipeline draws other ones.
        loss_kind: kind of the captured loss, see ``graph.samples.sample_flow``.
        whole_batch_error: as ``max_gradient_error``, against the module on the whole batch at once;
            None where that has to differ, by batch normalisation or random numbers.
        against: words for the program of the one process.
        notes: further results, one sentence each.
        tolerance: largest difference that is rounding in the types of the gradients.
        stateful: buffers and frozen parameters that the forward changes.
        foreign: operators of other libraries than torch that the model calls.
    """

    loss: float
    reference_loss: float
    max_gradient_error: float
    worst: str
    bitwise: bool
    exact: bool
    num_parameters: int
    num_devices: int
    is_random: bool = False
    loss_kind: LossKind = "mean"
    whole_batch_error: float | None = None
    against: str = SLICES
    notes: tuple[str, ...] = ()
    tolerance: float = ROUNDING
    stateful: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """True if all differences are rounding."""
        errors = self.max_gradient_error, self.whole_batch_error or 0.0
        return all(error < self.tolerance for error in errors)

    def why(self) -> str:
        """Explain a comparison that is not good."""
        if self.is_random:
            return (
                "nothing is verified: the model draws random numbers; try --dropout sample, or "
                "draw them (mixup, noise) where batches are made"
            )
        if self.max_gradient_error < self.tolerance:
            return (
                "micro-batches change what is trained: the pipeline has the gradients of its "
                f"micro-batches, which differ from those of the whole batch by "
                f"{self.whole_batch_error:.3g}, although the graph says that the loss is a "
                f"{self.loss_kind} over the samples; train with one micro-batch of the whole batch "
                "and no replicas (--microbatch-size, --max-replicas 1), or compute per sample what "
                f"computes across samples: {some(self.foreign) or 'an index along them'}"
            )
        if self.stateful and not self.exact:
            return (
                f"the gradients differ by more than rounding: the forward changes "
                f"{', '.join(self.stateful[:3])} once per micro-batch, each replica its own copy; "
                "plan with one micro-batch of the whole batch and no replicas (--microbatch-size, "
                "--max-replicas 1), or change it between the steps"
            )
        distance = abs(self.loss - self.reference_loss)
        what = "loss and gradients differ"
        causes = (
            "a number that the forward reads in Python, in no attribute of the module; something "
            "that magnifies rounding, as a choice between equal values does"
        )
        if distance < self.tolerance * max(abs(self.reference_loss), 1e-3):
            what = "the loss is right, and gradients differ"
            causes = "a backward that computes across samples, or is another at every call"
        causes += f"; {some(self.foreign)}, an unknown operator" if self.foreign else ""
        alone = "with --devices 1 the model runs as captured, without messages"
        if not self.exact:
            alone = "without --plan there are no replicas, and micro-batches of one size"
        return (
            f"{what} by more than rounding, most the gradient of {self.worst}; likely causes: "
            f"{causes}. To find it: {alone}; --json has the figures"
        )

    def summary(self) -> str:
        """Return the comparison in one line, then further results, a line each."""
        how = "bitwise equal" if self.bitwise else f"largest at {self.worst}"
        if not self.max_gradient_error and not self.bitwise:
            how = "gradients are equal, the loss alone differs"
        if self.is_random:
            how += '; random numbers differ: compare with dropout="sample" (--dropout sample)'
        if self.against != SLICES:
            how += f"; one process ran {self.against}"
        verdict = "right" if self.is_good else "not verified" if self.is_random else "not right"
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        comparison = (
            f"{verdict}: gradient error {self.max_gradient_error:.3g}, where less than "
            f"{self.tolerance:.3g} is rounding, over {self.num_parameters} parameters "
            f"on {devices} ({how}); loss {self.loss:.9g}, in one process "
            f"{self.reference_loss:.9g}"
        )
        return "\n".join([comparison, *self._further()])

    def _further(self) -> Iterator[str]:
        yield f"the loss is {SENTENCES[self.loss_kind]}"
        if self.whole_batch_error is not None and self.against != WHOLE:
            yield f"against the whole batch at once: gradient error {self.whole_batch_error:.3g}"
        yield from self.notes


def require_signal(expected: Reference) -> None:
    """Refuse a batch of which every comparison would say that all is well."""
    has_gradient = any(bool(dense(g).any()) for g in expected.gradients.values())
    if expected.loss == 0 and not has_gradient:
        raise TrainingError(
            "nothing can be verified: the loss of this batch is 0 and so are all gradients, which "
            "any pipeline would have; give a batch that the model has something to learn from "
            "(a contrastive loss needs two samples, a masked one a sample with a label)"
        )


def sliced_like(result: Reference, names: Iterable[str]) -> dict[str, Tensor]:
    """Return gradients cut into the slices of the pipeline, and dense."""
    cut = in_slices(result.gradients, names, view_named)
    return {name: dense(gradient) for name, gradient in cut.items()}


def largest_error(
    gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest difference relative to the other gradients, and its parameter. A gradient
    counts as at least a hundredth of the largest, as one that is zero on paper is only rounding.
    """
    largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in others.items()}
    floor = 1e-2 * max(largest.values(), default=0.0)
    return largest_distance(gradients, others, lambda name: max(largest.get(name, 0.0), floor))


def tolerance_of(captured: Captured) -> float:
    """Return the largest difference that counts as rounding: four steps of the coarsest type of a
    gradient, which may add up over the micro-batches.
    """
    types = gradient_types(captured.programs.example)
    return max([ROUNDING, *(4 * torch.finfo(t).eps for t in types)])
