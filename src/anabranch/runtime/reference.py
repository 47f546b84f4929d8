"""Loss and gradients of the user's own module in one process, with which every plan is compared.

The batch is cut into the slices that the loss is computed on. Gradients accumulate over them in
order, each loss weighted by its samples::

    gradient of the batch  =  sum over slices of  samples in slice / batch size  *  its gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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


def _moved(batch: Batch, place: torch.device) -> Batch:
    return pytree.tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, batch)


def call(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss and the metrics of a module on a batch."""
    if isinstance(batch, Mapping):
        return scalars(module(**batch))
    return scalars(module(*batch) if isinstance(batch, list | tuple) else module(batch))


def reference(module: nn.Module, batch: Batch, slices: Sequence[tuple[int, int]]) -> Reference:
    """Run the module, where it is, in training mode over slices [start, stop) that tile a batch."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    kept = {name: p.grad for name, p in parameters.items()}
    modes = [(part, part.training) for part in module.modules()]
    size, place = num_samples(batch), place_of(module)
    loss, metrics = 0.0, dict[str, float]()
    with unchanged_buffers(module):
        try:
            if not module.training:
                module.train()
            for parameter in parameters.values():
                parameter.grad = None
            for start, stop in slices:
                weight = (stop - start) / size
                results = call(module, _moved(take(batch, start, stop), place))
                value = results.pop("loss")
                torch.autograd.backward(value, torch.full_like(value, weight))
                loss += value.item() * weight
                for name, metric in results.items():
                    metrics[name] = metrics.get(name, 0.0) + metric.item() * weight
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
            for part, mode in modes:
                part.training = mode
    return Reference(loss, metrics, gradients)
