"""Kinds of losses over the samples of a batch, and what becomes of each under micro-batches."""

from __future__ import annotations

from typing import Literal

LossKind = Literal["mean", "sum", "weighted mean", "coupled"]

SENTENCES: dict[LossKind, str] = {
    "mean": "a mean over samples, which micro-batches and replicas add up exactly",
    "sum": "a sum over samples, which micro-batches and replicas add up exactly",
    "weighted mean": "a mean over what counts in the batch, such as labels that are not ignored; "
    "every micro-batch is divided by the count of the whole batch, so they add up exactly",
    "coupled": "coupled, as a contrastive loss is: samples are compared with each other, so the "
    "operators that do it have the whole batch at once, and those before them its micro-batches",
}
"""What becomes of a loss of each kind, after "the loss is"."""


def told(kind: LossKind | None) -> str:
    """One sentence on a loss that is no mean over samples; nothing on one that is."""
    return "" if kind in (None, "mean") else f"the loss is {SENTENCES[kind]}"
