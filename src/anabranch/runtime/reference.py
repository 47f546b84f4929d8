"""Loss and gradients of the user's own module in one process, with which every plan is compared.

The batch is cut into the slices that the loss is computed on. Gradients accumulate over them in
order, each loss weighted by its samples, unless it is a sum::

    gradient of the batch  =  sum over slices of  samples in slice / batch size  *  its gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anabranch.graph.batch_norms import in_one_process
from anabranch.graph.export import scalars
from anabranch.runtime.compute.stage_compute import unchanged_buffers
from anabranch.runtime.placement import place_of
from anabranch.workload import Batch


@dataclass(frozen=True)
class Reference:
    """Loss, metrics and gradients of one step; parameters without gradient are left out."""

    loss: float
    metrics: Mapping[str, float]
    gradients: Mapping[str, Tensor]


def num_samples(batch: Batch) -> int:
    """Samples in a batch: the size of dimension 0 of its tensors."""
    return next(int(t.shape[0]) for t in pytree.tree_leaves(batch) if isinstance(t, Tensor))


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Samples [start, stop) of a batch."""
    return pytree.tree_map(
        lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, batch
    )


def moved(batch: Batch, place: torch.device) -> Batch:
    """The same batch on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, batch)


def call(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss and the metrics of a module on a batch."""
    with in_one_process():
        if isinstance(batch, Mapping):
            return scalars(module(**batch))
        return scalars(module(*batch) if isinstance(batch, list | tuple) else module(batch))


@contextmanager
def in_training_mode(module: nn.Module) -> Iterator[None]:
    """Inside, the module trains; parts that the user put into evaluation mode stay in it, unless
    the module as a whole is.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        if not module.training:
            module.train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


Weights = Callable[[int, int], Mapping[str, float]]
"""(samples of a slice, of the batch) -> what loss and metrics of the slice count for."""


def reference(
    module: nn.Module,
    batch: Batch,
    slices: Sequence[tuple[int, int]],
    weights: Weights | None = None,
) -> Reference:
    """Run the module, where it is, in training mode over slices [start, stop) that tile a batch."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    kept = {name: p.grad for name, p in parameters.items()}
    size, place = num_samples(batch), place_of(module)
    loss, metrics = 0.0, dict[str, float]()
    with unchanged_buffers(module), in_training_mode(module):
        try:
            for parameter in parameters.values():
                parameter.grad = None
            for start, stop in slices:
                share = (stop - start) / size
                counts = {} if weights is None else weights(stop - start, size)
                weight = counts.get("loss", share)
                results = call(module, moved(take(batch, start, stop), place))
                value = results.pop("loss")
                torch.autograd.backward(value, torch.full_like(value, weight))
                loss += value.item() * weight
                for name, metric in results.items():
                    counted = metric.item() * counts.get(name, share)
                    metrics[name] = metrics.get(name, 0.0) + counted
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
    return Reference(loss, metrics, gradients)
