"""Layout of a batch: flat, named tensors here, nested ones for the user's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from anabranch.errors import CaptureError
from anabranch.workload import Batch


@dataclass(frozen=True)
class BatchLayout:
    """Leaves of a batch, with an example of each, and how they are nested."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    keywords: bool

    @staticmethod
    def of(example: Batch) -> BatchLayout:
        paths, spec = pytree.tree_flatten_with_path(example)
        leaves = tuple(leaf for _, leaf in paths)
        positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        names = tuple(leaf_name(paths[i][0]) for i in positions)
        if not positions:
            raise CaptureError(
                "the example batch holds no tensor; its tensors say what a batch looks like"
            )
        sizes = {name: tuple(leaves[i].shape) for name, i in zip(names, positions, strict=True)}
        if not all(sizes.values()) or len({size[0] for size in sizes.values()}) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise CaptureError(
                "dimension 0 of every tensor in the batch has to be the samples, but the shapes "
                f"are {listed}; expand what is the same for all samples, or make it a buffer of "
                f"the module{_packed(sizes)}"
            )
        if 0 in {size[0] for size in sizes.values()}:
            raise CaptureError(
                "the example batch has no samples; at least one is needed, better two"
            )
        return BatchLayout(names, positions, spec, leaves, isinstance(example, Mapping))

    @property
    def samples(self) -> int:
        return int(self.leaves[self.positions[0]].shape[0])

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the module's forward."""
        leaves = list(self.leaves)
        for i, value in zip(self.positions, tensors, strict=True):
            leaves[i] = value
        batch = pytree.tree_unflatten(leaves, self.spec)
        if self.keywords:
            return (), dict(batch)
        return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}

    def resized(self, samples: int, device: torch.device | None) -> list[torch.Tensor]:
        """The example's leaves with that many samples, repeated as needed."""
        rows = torch.arange(samples) % self.samples
        result = []
        for i in self.positions:
            leaf = self.leaves[i]
            if device is not None and device.type == "meta":
                shape = samples, *leaf.shape[1:]
                result.append(torch.empty(shape, dtype=leaf.dtype, device=device))
            else:
                result.append(leaf.detach()[rows.to(leaf.device)].to(device))
        return result


def _packed(sizes: Mapping[str, tuple[int, ...]]) -> str:
    """A way on where the parts of all samples are packed into dimension 0, such as patches."""
    samples = min((size[0] for size in sizes.values() if size), default=0)
    for name, size in sizes.items():
        if samples > 0 and size and size[0] > samples and size[0] % samples == 0:
            parts = (samples, size[0] // samples, *size[1:])
            return (
                f"; if {name} has the parts of {samples} samples one after the other, as patches "
                f"of images, give it as {parts} and flatten the first two dimensions in the forward"
            )
    return ""


def leaf_name(path: tuple[Any, ...]) -> str:
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return ".".join(map(str, keys)) or "batch"
