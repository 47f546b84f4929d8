"""Layout of a batch: named tensors in a flat dict here, nested ones in the user's forward."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from anabranch.data.packed import PackedBatch, RowPacking, plain
from anabranch.errors import CaptureError
from anabranch.workload import Batch

Sizes = tuple[tuple[int, ...], ...]
"""Shapes of a batch's tensors without the samples, in their order."""


@dataclass(frozen=True)
class BatchLayout:
    """An example of a batch, flattened, and how it is nested.

    Attributes:
        names: names of the tensors, by their paths in the batch.
        positions: positions of the tensors among the leaves.
        leaves: tensors and other entries of the example.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(example: Batch) -> BatchLayout:
        """Return the layout of batches like an example; raise CaptureError without samples."""
        paths, spec = pytree.tree_flatten_with_path(plain(example))
        leaves = tuple(leaf for _, leaf in paths)
        positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        names = tuple(leaf_name(paths[i][0]) for i in positions)
        if not positions:
            kinds = sorted({type(leaf).__name__ for leaf in leaves if is_dataclass(leaf)})
            advice = [f"; register_dataclass({kind}) of torch.export shows its" for kind in kinds]
            raise CaptureError(
                "the example batch holds no tensor; its tensors say what a batch looks like"
                + "".join(advice)
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise CaptureError(f"two tensors of the batch are called {twice[0]}; rename a key")
        for name, i in zip(names, positions, strict=True):
            if leaves[i].layout is not torch.strided:
                raise CaptureError(
                    f"{name} in the batch is a sparse tensor ({leaves[i].layout}), which cannot be "
                    "cut by samples: give it dense (to_dense), or as indices and values of shape "
                    "[samples, most], padded, for F.embedding_bag(per_sample_weights=values)"
                )
        sizes = {name: tuple(leaves[i].shape) for name, i in zip(names, positions, strict=True)}
        if not all(sizes.values()) or len({size[0] for size in sizes.values()}) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise CaptureError(
                "dimension 0 of every tensor in the batch has to be the samples, but the shapes "
                f"are {listed}; expand what is the same for all samples, or make it a buffer of "
                f"the module{_rows_advice(sizes)}"
            )
        if 0 in {size[0] for size in sizes.values()}:
            raise CaptureError(
                "the example batch has no samples; at least one is needed, better two"
            )
        return BatchLayout(names, positions, spec, leaves)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        """Leaves of the example by name."""
        return _by_name(pytree.tree_unflatten(self.leaves, self.spec))

    @cached_property
    def types(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensor of a batch -> its shape without the samples, and its type."""
        tensors = [self.leaves[i] for i in self.positions]
        pairs = zip(self.names, tensors, strict=True)
        return {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in pairs}

    @property
    def sizes(self) -> Sizes:
        """Shapes of the tensors without the samples."""
        return tuple(shape for shape, _ in self.types.values())

    def text(self, *, unlike: BatchLayout | None = None) -> str:
        """Return the tensors with their types as text, only those that differ from ``unlike``."""
        types = self.types.items()
        changed = [item for item in types if unlike is None or item not in unlike.types.items()]
        return ", ".join(f"{name} {type_text(*kind)}" for name, kind in changed)

    def packed(self, batch: Batch) -> Batch:
        """Return a batch as the workload's data has it; a user's own may have rows of samples."""
        packing = self.spec.context[1] if self.spec.type is PackedBatch else None
        return packing.packed(batch) if isinstance(packing, RowPacking) else plain(batch)

    def flatten(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch by name, ordered as in the example; ValueError if it
        differs.
        """
        leaves = _by_name(self.packed(batch))
        tensors = {n: leaf for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        if leaves.keys() == self._entries.keys() and tensors.keys() == set(self.names):
            return {name: tensors[name] for name in self.names}
        missing = [name for name in self.names if name not in tensors]
        extra = [name for name in tensors if name not in self.names]
        wrong = [f"lacks {', '.join(missing)}"] if missing else []
        wrong += [f"has {', '.join(extra)} besides"] if extra else []
        others = sorted({n.partition(".")[0] for n in leaves.keys() ^ self._entries.keys()})
        wrong = wrong or [
            f"differs in entries of {', '.join(others)} that are no tensors: give one, or leave out"
        ]
        raise ValueError(
            f"the batch holds {', '.join(tensors) or 'no tensors'}, but the workload's example "
            f"holds {', '.join(self.names)}: it {' and '.join(wrong)}; every batch has to be built "
            "as the example is"
        )

    def changed_values(self, batch: Batch) -> list[str]:
        """Return entries other than tensors that differ from those of the example, as text."""
        if len(self.positions) == len(self.leaves):
            return []
        leaves = _by_name(self.packed(batch))
        return [
            f"{name} is {_shown(leaves[name])}, but in the workload's example {_shown(kept)}"
            for name, kept in self._entries.items()
            if not isinstance(kept, torch.Tensor) and not _same_value(leaves[name], kept)
        ]

    @property
    def samples(self) -> int:
        return int(self.leaves[self.positions[0]].shape[0])

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> Batch:
        """Return a batch of these tensors, nested as the example."""
        leaves = list(self.leaves)
        for i, value in zip(self.positions, tensors, strict=True):
            leaves[i] = value
        return pytree.tree_unflatten(leaves, self.spec)

    def resized(self, samples: int, device: torch.device | None) -> list[torch.Tensor]:
        """Return the example's tensors with that many samples, repeated as needed."""
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


def _by_name(batch: Batch) -> dict[str, Any]:
    paths, _ = pytree.tree_flatten_with_path(batch)
    return {leaf_name(path): leaf for path, leaf in paths}


def _same_value(value: Any, kept: Any) -> bool:
    if value is kept:
        return True
    try:
        both_nan, equal = value != value and kept != kept, value == kept
        is_equal = equal.all() if hasattr(equal, "all") else equal  # of two arrays
        return both_nan or (type(value) is type(kept) and bool(is_equal))
    except (TypeError, ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), 60)


def _rows_advice(sizes: Mapping[str, tuple[int, ...]]) -> str:
    """Advice for a batch that has the parts of all samples, such as patches, in dimension 0."""
    samples = min((size[0] for size in sizes.values() if size), default=0)
    for name, size in sizes.items():
        if samples > 0 and size and size[0] > samples and size[0] % samples == 0:
            parts = (samples, size[0] // samples, *size[1:])
            in_dict = "give the batch as a dict and " * name.isdigit()  # a place has no name
            key = "NAME" if in_dict else repr(name)
            return (
                f"; if {name} has the parts of {samples} samples one after the other, as patches "
                f"of images, {in_dict}say so: Workload(..., rows={{{key}: {parts[1]}}}), or give "
                f"it as {parts} and flatten the first two dimensions in the forward; a "
                "vision-language model of transformers takes batches of anabranch.multimodal_batch "
                "as it is"
            )
    if several := [name for name, size in sizes.items() if size and size[0] > samples > 0]:
        return (
            f"; if {several[0]} has another number of entries for each sample, as the indices of "
            "an EmbeddingBag with offsets, pad it to [samples, longest]: padding_idx leaves the "
            "padding out"
        )
    return ""


def sizes_of(tensors: Mapping[str, torch.Tensor]) -> Sizes:
    """Return the shapes of a batch's tensors without the samples."""
    return tuple(tuple(tensor.shape[1:]) for tensor in tensors.values())


def type_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return shape and type as text, such as ``[samples, 64] int64``."""
    return f"[{', '.join(['samples', *map(str, shape)])}] {str(dtype).removeprefix('torch.')}"


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name of a tensor of a batch, such as ``image.pixels``."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return ".".join(map(str, keys)) or "batch"
