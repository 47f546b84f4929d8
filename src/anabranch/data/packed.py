"""Batches of which some tensors have other things than samples in dimension 0.

Vision models take the patches or images of all samples one after the other, positions have the
samples in dimension 1. A ``PackedBatch`` holds such tensors with the samples in front, so that
whatever cuts batches may cut them, and brings them back when the module is called::

    module's own            in a PackedBatch
    labels [n, 16]          [n, 16]
    pixel_values [n * k, d] [n, k, d]         rows={"pixel_values": k}
    position_ids [3, n, 16] [n, 3, 16]        samples_in={"position_ids": 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anabranch.errors import DataError


class Packing(Protocol):
    """How a module is called on tensors that have the samples in dimension 0; two are equal that
    pack alike.
    """

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call a module; ``traced`` without operations whose sizes depend on the data."""


class PackedBatch:
    """Tensors of a batch by name, with the samples in dimension 0.

    PyTorch's pytrees know it, so it is cut, moved and compared as a dict of tensors is.
    """

    def __init__(self, tensors: Mapping[str, Any], packing: Packing) -> None:
        self.tensors, self.packing = dict(tensors), packing

    def __repr__(self) -> str:
        shapes = {name: tuple(getattr(t, "shape", ())) for name, t in self.tensors.items()}
        return f"PackedBatch({shapes}, {self.packing})"


def _flatten(batch: PackedBatch) -> tuple[list[Any], Any]:
    return list(batch.tensors.values()), (tuple(batch.tensors), batch.packing)


def _flatten_with_keys(batch: PackedBatch) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(batch)
    return list(zip(map(pytree.MappingKey, batch.tensors), values, strict=True)), context


def _unflatten(values: Any, context: Any) -> PackedBatch:
    return PackedBatch(dict(zip(context[0], values, strict=True)), context[1])


pytree.register_pytree_node(
    PackedBatch,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="anabranch.PackedBatch",
)


def call_module(module: nn.Module, batch: Any, *, traced: bool = False) -> Any:
    """Call a module on a batch: a dict as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, PackedBatch):
        return batch.packing.call(module, batch.tensors, traced=traced)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


@dataclass(frozen=True)
class Rows:
    """Packing of a user's own module.

    Attributes:
        rows: name of a tensor -> its rows per sample, in dimension 0.
        samples_in: name of a tensor -> the dimension of the samples.
    """

    rows: tuple[tuple[str, int], ...] = ()
    samples_in: tuple[tuple[str, int], ...] = ()

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call the module with its own arguments."""
        result = dict(tensors)
        for name, _ in self.rows:
            result[name] = result[name].flatten(0, 1)
        for name, dim in self.samples_in:
            result[name] = result[name].movedim(0, dim)
        return module(**result)

    def packed(self, batch: Any, *, stacked: bool = False) -> Any:
        """A batch of the user's with the samples in front.

        Args:
            stacked: of single samples, which puts them in front already.

        Raises:
            DataError: if a tensor has another number of rows than its samples make.
        """
        if isinstance(batch, PackedBatch) or not (self.rows or self.samples_in):
            return batch
        tensors = dict(batch)
        rows, dims = dict(self.rows), dict(self.samples_in)
        if missing := [name for name in (*rows, *dims) if name not in tensors]:
            raise DataError(
                f"the batch has no {', '.join(missing)}, of which the Workload says where the "
                f"samples are; it has {', '.join(tensors)}"
            )
        if not stacked:
            samples = self._samples(tensors)
            for name, count in rows.items():
                tensors[name] = _parted(name, tensors[name], samples, count)
            for name, dim in dims.items():
                tensors[name] = tensors[name].movedim(dim, 0)
        return PackedBatch(tensors, self)

    def _samples(self, tensors: Mapping[str, Any]) -> int:
        """Samples of a batch, by the first tensor that has nothing else in dimension 0."""
        apart = {name for name, _ in (*self.rows, *self.samples_in)}
        for name, tensor in tensors.items():
            if name not in apart and isinstance(tensor, Tensor) and tensor.dim():
                return int(tensor.shape[0])
        if self.samples_in:
            name, dim = self.samples_in[0]
            return int(tensors[name].shape[dim])
        name, count = self.rows[0]
        return int(tensors[name].shape[0]) // count


def _parted(name: str, tensor: Tensor, samples: int, count: int) -> Tensor:
    """A tensor of rows as [samples, rows of a sample, ...]."""
    if tensor.shape[0] != samples * count:
        whole, rest = divmod(int(tensor.shape[0]), count)
        where = f"sample {whole} has {rest} rows" if rest else f"there are rows of {whole} samples"
        raise DataError(
            f"{name} has {tensor.shape[0]} rows, but {samples} samples of {count} rows each have "
            f"{samples * count}: {where}. Rows are cut by samples, so those of one would move into "
            "the next: give every sample as many (pad them, masked), or for a vision-language "
            "model of transformers let anabranch.multimodal_batch do so"
        )
    return tensor.reshape(samples, count, *tensor.shape[1:])


def inferred(example: Any) -> Rows:
    """Where the tensors of an example have their samples, if they are not all in dimension 0.

    The number of samples is that of the labels. Nothing is inferred without ``labels``.
    """
    labels = example.get("labels") if isinstance(example, Mapping) else None
    if not isinstance(labels, Tensor) or not labels.dim():
        return Rows()
    samples, rows, dims = int(labels.shape[0]), [], []
    for name, tensor in example.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.shape[0] == samples:
            continue
        if tensor.dim() > 1 and tensor.shape[1] == samples and tensor.shape[0] % samples:
            dims.append((name, 1))
        elif samples and tensor.shape[0] and tensor.shape[0] % samples == 0:
            rows.append((name, int(tensor.shape[0]) // samples))
    return Rows(tuple(rows), tuple(dims))
