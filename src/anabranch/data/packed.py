"""Batches in which some tensors do not have the samples in dimension 0.

Vision models take the patches or images of all samples one after the other; positions have the
samples in dimension 1. A ``PackedBatch`` holds such tensors with the samples in front, so that they
can be cut like any batch, and brings them back when the module is called::

    module's own            in a PackedBatch
    labels [n, 16]          [n, 16]
    pixel_values [n * k, d] [n, k, d]         rows={"pixel_values": k}
    position_ids [3, n, 16] [n, 3, 16]        samples_in={"position_ids": 1}
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anabranch.errors import DataError, warn


class BatchPacking(Protocol):
    """Call of a module on tensors with the samples in dimension 0; packings compare by value."""

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call a module; ``traced`` without operations whose sizes depend on the data."""


class PackedBatch:
    """Tensors of a batch by name, with the samples in dimension 0.

    PyTorch's pytrees know the class, so it is cut, moved and compared like a dict of tensors.
    """

    def __init__(self, tensors: Mapping[str, Any], packing: BatchPacking) -> None:
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


def plain(batch: Any) -> Any:
    """Return a mapping that PyTorch's pytrees do not know, such as ``BatchEncoding``, as a dict."""
    is_known = type(batch) in pytree.SUPPORTED_NODES or not isinstance(batch, Mapping)
    return batch if is_known else dict(batch)


def call_module(module: nn.Module, batch: Any, *, traced: bool = False) -> Any:
    """Call a module on a batch: a dict as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, PackedBatch):
        return batch.packing.call(module, batch.tensors, traced=traced)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


def unfit_arguments(module: nn.Module, batch: Any) -> str:
    """Say how a batch differs from the arguments of a module's forward; empty if it does not."""
    if isinstance(batch, PackedBatch):
        return ""
    named = batch if isinstance(batch, Mapping) else {}
    listed = () if named else batch if isinstance(batch, list | tuple) else (batch,)
    takes = inspect.signature(module.forward)
    try:
        takes.bind(*listed, **named)
    except TypeError as error:
        names, has = list(takes.parameters), ", ".join(named) or f"{len(listed)} without names"
        way = "; to pass a dict whole, yield (batch,)" * (bool(named) and len(names) == 1)
        return f"its forward takes {', '.join(names)}, the example has {has}: {error}{way}"
    return ""


@dataclass(frozen=True)
class RowPacking:
    """Packing of a user's own module.

    Attributes:
        rows: (name of a tensor, its rows per sample in dimension 0, name of a tensor that has the
            number of rows of each sample, or empty).
        samples_in: (name of a tensor, the dimension of the samples).
    """

    rows: tuple[tuple[str, int, str], ...] = ()
    samples_in: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(
        example: Any, rows: Mapping[str, int | str], samples_in: Mapping[str, int]
    ) -> RowPacking:
        """Return the packing of an example: as given, and as the shapes of other tensors show it.

        ``labels`` has the number of samples. A tensor with a multiple of it in dimension 0 has rows
        if it has two dimensions; one with it in dimension 1 alone has the samples there.
        """
        labels = example.get("labels") if isinstance(example, Mapping) else None
        numbers, dims = {n: (k, "") for n, k in rows.items() if isinstance(k, int)}, {**samples_in}
        for name, counts in rows.items():
            if isinstance(counts, str):
                if not isinstance(example, Mapping) or counts not in example:
                    raise DataError(
                        f"rows of {name} are counted by {counts}, which the example of the "
                        "Workload does not have: give it as a dict with both"
                    )
                numbers[name] = int(example[counts][0]), counts
        samples = len(labels) if isinstance(labels, Tensor) and labels.dim() else 0
        if samples:
            for name, tensor in example.items():
                if name in numbers or name in dims or not isinstance(tensor, Tensor):
                    continue
                sizes = tensor.shape[:2]
                if sizes[1:] == (samples,) and sizes[0] % samples:
                    dims[name] = 1
                elif len(sizes) == 2 and sizes[0] > samples and sizes[0] % samples == 0:
                    numbers[name] = sizes[0] // samples, ""
        packing = RowPacking(tuple((n, *k) for n, k in numbers.items()), tuple(dims.items()))
        if seen := [
            *(f"{name} has {k} rows per sample" for name, k, _ in packing.rows if name not in rows),
            *(f"{n} has samples in dimension {d}" for n, d in dims.items() if n not in samples_in),
        ]:
            warn(
                f"by the shapes of the example of {samples} samples, {', '.join(seen)}; say so "
                "by rows={...} or samples_in={...} of the Workload, or otherwise if it is not so"
            )
        return packing

    def call(self, module: nn.Module, tensors: Mapping[str, Any], *, traced: bool) -> Any:
        """Call the module with its own arguments."""
        result = dict(tensors)
        for name, _, _ in self.rows:
            result[name] = result[name].flatten(0, 1)
        for name, dim in self.samples_in:
            result[name] = result[name].movedim(0, dim)
        return module(**result)

    def packed(self, batch: Any, *, is_stacked: bool = False) -> Any:
        """Pack a batch of the user, with the samples in front.

        Args:
            is_stacked: the batch was stacked from single samples, so they are in front already.

        Raises:
            DataError: if the rows of a tensor are not those of its samples.
        """
        if isinstance(batch, PackedBatch) or not (self.rows or self.samples_in):
            return plain(batch)
        tensors = dict(batch) if isinstance(batch, Mapping) else {}
        apart = [*(row[0] for row in self.rows), *(name for name, _ in self.samples_in)]
        if missing := [name for name in apart if name not in tensors]:
            raise DataError(
                f"the batch has no {', '.join(missing)}, of which the Workload says where the "
                f"samples are (rows, samples_in); it has {', '.join(tensors) or 'no names'}"
            )
        if not is_stacked:
            others = (t for n, t in tensors.items() if n not in apart and isinstance(t, Tensor))
            first = next(others, None)
            for name, dim in self.samples_in:
                tensors[name] = tensors[name].movedim(dim, 0)
                first = tensors[name] if first is None else first
            for name, count, counts in self.rows:
                samples = len(tensors[name]) // count if first is None else len(first)
                numbers = tensors[counts].tolist() if counts else []
                tensors[name] = _parted(name, tensors[name], samples, count, numbers)
        return PackedBatch(tensors, self)


def _parted(name: str, tensor: Tensor, samples: int, count: int, numbers: Sequence[int]) -> Tensor:
    """Reshape a tensor of rows to [samples, rows, ...]; other numbers of rows are other buckets."""
    other = [sample for sample, number in enumerate(numbers) if number != numbers[0]]
    if len(tensor) % samples or other or (numbers and numbers[0] * samples != len(tensor)):
        has = f"{samples} samples have {len(tensor)} rows of {name}"
        if other:
            has = f"sample {other[0]} has {numbers[other[0]]} rows of {name}, sample 0 {numbers[0]}"
        raise DataError(
            f"{has}; in the example of the Workload each has {count}, and rows of one sample would "
            "move into the next. Give every sample as many (pad them, masked), or for a "
            "vision-language model of transformers let anabranch.multimodal_batch do so"
        )
    return tensor.reshape(samples, -1, *tensor.shape[1:])
