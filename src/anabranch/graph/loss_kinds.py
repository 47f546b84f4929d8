"""Kinds of losses over samples, and of batch normalisation, and how micro-batches change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from anabranch.errors import some

LossKind = Literal["mean", "sum", "weighted mean", "coupled"]

SENTENCES: dict[LossKind, str] = {
    "mean": "a mean over samples, which micro-batches and replicas add up exactly",
    "sum": "a sum over samples, which micro-batches and replicas add up exactly",
    "weighted mean": "a mean over what counts in the batch, such as labels that are not ignored; "
    "every micro-batch is divided by the count of the whole batch, so they add up exactly",
    "coupled": "coupled, as a contrastive loss is: samples are compared with each other, "
    "normalised together (SyncBatchNorm) or counted together (the balance of a router's experts), "
    "so the operators that do it have the whole batch at once, and those before them its "
    "micro-batches",
}
"""Explanation of each kind of loss, after "the loss is"."""


def loss_notes(
    kind: LossKind | None, normalised: Sequence[str], stateful: Sequence[str] = ()
) -> list[str]:
    """Return sentences on a loss that is no mean over samples, on modules that take statistics of a
    micro-batch, and on buffers and frozen parameters that the forward changes.
    """
    sentences = [] if kind in (None, "mean") else [f"the loss is {SENTENCES[kind]}"]
    if normalised:
        sentences.append(
            f"batch normalisation in {some(normalised)}: its statistics are those of a "
            "micro-batch, as with gradient accumulation; SyncBatchNorm takes those of the whole "
            "batch, GroupNorm does not depend on it"
        )
    if stateful:
        sentences.append(
            f"the forward changes {some(stateful)}: once per micro-batch and replica, as "
            "with gradient accumulation, not once per batch; one micro-batch without replicas, or "
            "a change between the steps, is as in one process"
        )
    return sentences
