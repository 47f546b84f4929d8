"""Batches of DataLoaders and data sets: the same on every rank, from any position, by columns.

::

    DataLoader over a data set with an index   sampler -> sample numbers -> samples -> collate
    data set with an index                     shuffled by seed and epoch, batches of the plan
    any other loader                           its own batches, one after the other

Random numbers (for the order, for augmentations) depend on a seed of the run, the epoch and the
number of the batch, on every rank. So ranks read the same samples, and training that is resumed in
the middle of an epoch has the rest of it. With an index earlier batches need not be read for that;
other loaders go on by their ``state_dict``, if they have one, or are read up to the position.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.weak import WeakTensorKeyDictionary

from anabranch.data.columns import Columns
from anabranch.data.packed import RowPacking
from anabranch.data.random_state import mixed_seed, seeded
from anabranch.errors import DataError

TensorTypes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a batch's tensor -> (shape of a sample, type)."""

NOT_PACKED = RowPacking()

_SAMPLES: MutableMapping[Tensor, tuple[bytes, bool]] = WeakTensorKeyDictionary()
"""Tensor of a batch that was read by columns -> (digest of its samples, whether it has values)."""


def samples_digest(tensor: Tensor) -> bytes | None:
    """Return a digest of the numbers of a tensor's samples; None if they are not known."""
    entry = _SAMPLES.get(tensor)
    return None if entry is None else entry[0]


def is_unread(tensor: Tensor) -> bool:
    """Return True if a tensor of a batch stands for a column that was not read."""
    entry = _SAMPLES.get(tensor)
    return entry is not None and not entry[1]


class Loader:
    """Function for ``Workload.data`` or ``eval_data``, from an object that yields or holds samples.

    Args:
        source: see ``loader_of``.
        shuffle: whether a data set without a sampler of its own is read in random order.
        packing: position of the samples in the tensors of a batch.
    """

    def __init__(self, source: Any, *, shuffle: bool, packing: RowPacking = NOT_PACKED) -> None:
        self.source, self._shuffle, self._packing = source, shuffle, packing
        self._samplers: list[Any] = []
        if isinstance(source, DataLoader):
            self._samplers = _with_wrapped(source, "sampler", "batch_sampler")
            for sampler in self._samplers:
                if getattr(sampler, "num_replicas", 1) > 1:
                    raise ValueError(
                        f"the DataLoader has a {type(sampler).__name__} for "
                        f"{sampler.num_replicas} replicas, each of which gets other samples; every "
                        "rank of a pipeline takes its slices from the same whole batch: leave the "
                        "sampler out, and give the DataLoader the batch size of a whole step"
                    )
        generators = (getattr(sampler, "generator", None) for sampler in self._samplers)
        self._generators = {g: g.initial_seed() for g in generators if g is not None}

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch if the source decides that itself; None if not, or not known."""
        if self._is_indexed_set:
            return None
        size: int | None = getattr(self.source, "batch_size", None)
        return size

    def require_batch_size(self, batch_size: int) -> None:
        """Raise DataError if the source makes batches of another size, or none of this size."""
        if self.batch_size not in (None, batch_size):
            raise DataError(
                f"the {type(self.source).__name__} has batches of {self.batch_size} samples, and "
                f"{batch_size} are asked for; give both one batch size (--batch-size "
                f"{self.batch_size}, or a plan for it), or the Workload the data set itself"
            )
        if self.num_batches(batch_size) == 0:
            name = type(self.source).__name__
            raise DataError(
                f"the {name} has no batch of {batch_size} samples; take a smaller --batch-size, or "
                "a DataLoader without drop_last, if its data set has any samples at all"
            )

    @property
    def _is_indexed_set(self) -> bool:
        """True if the source holds samples and has an index."""
        has_index = hasattr(self.source, "__getitem__") and hasattr(self.source, "__len__")
        return has_index and not isinstance(self.source, DataLoader | IterableDataset)

    def num_batches(self, batch_size: int) -> int | None:
        """Return the batches of an epoch; None if the source does not say."""
        if self._is_indexed_set:
            return -(-len(self.source) // batch_size)
        if isinstance(self.source, DataLoader) and not isinstance(
            self.source.dataset, IterableDataset
        ):
            # A sampler of the user may have no length, or one that is not implemented.
            with suppress(TypeError, NotImplementedError):
                return len(self.source)
        return None

    def is_short_of(self, batch_size: int) -> bool:
        """Return True for a data set with fewer samples than a batch."""
        return self._is_indexed_set and len(self.source) < batch_size

    @property
    def has_state(self) -> bool:
        """True if the source saves and loads its position."""
        return hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")

    def __call__(self, batch_size: int, epoch: int = 0) -> Iterator[Any]:
        """Generate the batches of an epoch, as ``Workload.data`` does."""
        return self.batches(batch_size, epoch)

    def batches(
        self,
        batch_size: int,
        epoch: int,
        *,
        start: int = 0,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        reads: Callable[[], Collection[str] | None] = lambda: None,
        types: TensorTypes | None = None,
    ) -> Iterator[Any]:
        """Generate the batches of an epoch from a position on.

        Args:
            batch_size: samples of a batch of the plan.
            start: batches to pass over.
            seed: seed of the run.
            state: ``state_dict`` of the source at that position.
            reads: called before each batch, returns the names of the tensors that this rank needs;
                None for all. If the tensors are columns of the source, those not needed are not
                read: zeros stand for them, expanded from one number.
            types: shapes and types of these zeros.

        Raises:
            DataError: if the source makes batches of another size, or has fewer than ``start``.
        """
        self.require_batch_size(batch_size)
        for generator, initial in self._generators.items():
            generator.manual_seed(mixed_seed(initial, epoch))
        for part in (*self._samplers, *_with_wrapped(self.source, "dataset")):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        order = self._order(batch_size, epoch, seed, start)
        if order is None:
            made = self._as_they_come(batch_size, epoch, start, seed, state)
        else:
            made = self._by_samples(order, epoch, start, seed, reads, types)
        samples = self._is_indexed_set or isinstance(self.source, IterableDataset)
        collate = getattr(self.source, "collate_fn", default_collate if samples else None)
        return map(partial(self._packing.packed, is_stacked=collate is default_collate), made)

    def _order(
        self, batch_size: int, epoch: int, seed: int, start: int
    ) -> Iterator[Sequence[int]] | None:
        """Return the sample numbers of every batch from ``start`` on; None without an index."""
        source = self.source
        if isinstance(source, DataLoader):
            # Workers of the DataLoader read ahead by its own order.
            has_index = not isinstance(source.dataset, IterableDataset)
            if source.batch_sampler is None or source.num_workers or not has_index:
                return None
            return _drawn(source.batch_sampler, seed, epoch, start)
        if not self._is_indexed_set:
            return None
        numbers = torch.arange(len(source))
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
            numbers = torch.randperm(len(source), generator=generator)
        begins = range(0, len(numbers), batch_size)
        if len(begins) < start:
            raise too_short(start, epoch, len(begins))
        return (numbers[i : i + batch_size].tolist() for i in begins[start:])

    def _by_samples(
        self,
        order: Iterator[Sequence[int]],
        epoch: int,
        start: int,
        seed: int,
        reads: Callable[[], Collection[str] | None],
        types: TensorTypes | None,
    ) -> Iterator[Any]:
        is_loader = isinstance(self.source, DataLoader)
        dataset = self.source.dataset if is_loader else self.source
        collate = self.source.collate_fn if is_loader else default_collate
        columns = set(getattr(dataset, "column_names", None) or ())
        by_column = (
            types is not None
            and columns == types.keys()
            and hasattr(dataset, "select_columns")
            and collate is default_collate
            and not _has_transform(dataset)
        )
        for number, samples in enumerate(order, start):
            names = reads() if by_column else None
            with seeded(seed, epoch, number):
                if names is None or columns <= set(names):
                    batch = _fetched(dataset, samples, collate)
                elif columns.isdisjoint(names):
                    batch = {}
                else:
                    batch = _fetched(dataset.select_columns(sorted(names)), samples, collate)
            if by_column and types is not None:
                read = set(batch)
                batch = {  # with zeros for columns that were not read, in the order of the example
                    name: batch[name]
                    if name in read
                    else torch.zeros((), dtype=dtype).expand(len(samples), *shape)
                    for name, (shape, dtype) in types.items()
                }
                digest = hashlib.blake2b(repr(list(samples)).encode(), digest_size=16).digest()
                for name, tensor in batch.items():
                    _SAMPLES[tensor] = digest, name in read
            yield batch

    def _as_they_come(
        self, batch_size: int, epoch: int, start: int, seed: int, state: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        source = self.source
        if isinstance(source, IterableDataset):
            source = DataLoader(source, batch_size=batch_size)
        passed = 0
        if state is not None and start:
            self.source.load_state_dict(state)
            passed = start
        _leave_workers_of_parent(source)
        yield from _drawn(source, seed, epoch, start, passed)


def loader_of(data: Any, *, shuffle: bool, packing: RowPacking = NOT_PACKED) -> Any:
    """Return a function that yields batches, made of any kind of data.

    Args:
        data: such a function; or a ``DataLoader``, a data set with ``__len__`` and ``__getitem__``,
            or an ``IterableDataset``, all of samples; or any other iterable, of batches.
        shuffle, packing: see ``Loader``.

    Raises:
        TypeError: if ``data`` is none of these, or a function of other arguments.
        ValueError: if its sampler deals samples out to replicas.
    """
    if data is None or isinstance(data, Loader):
        return data
    is_set = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_set or isinstance(data, DataLoader | IterableDataset):
        return Loader(data, shuffle=shuffle, packing=packing)
    call = "data(batch_size, epoch)" if shuffle else "eval_data(batch_size)"
    if inspect.isgenerator(data):
        raise TypeError(
            f"the data of a Workload is the generator {data.__name__}, which yields its batches "
            f"once; give a function {call} that returns a new one each time"
        )
    if callable(data):
        try:
            inspect.signature(data).bind(*range(1 + shuffle))
        except ValueError:  # of C, without a signature
            pass
        except TypeError as error:
            name = getattr(data, "__name__", type(data).__name__)
            raise TypeError(f"{name} cannot be called as {call}: {error}") from None
        if packing == NOT_PACKED:
            return data
        return lambda *arguments: map(packing.packed, data(*arguments))
    if isinstance(data, Iterable):
        return Loader(data, shuffle=shuffle, packing=packing)
    raise TypeError(
        f"the data of a Workload is a {type(data).__name__}; give it a function data(batch_size, "
        "epoch) that yields batches, a DataLoader, or a data set"
    )


def _with_wrapped(part: Any, *names: str) -> list[Any]:
    """Return an object and all objects that it wraps in attributes of these names, each once."""
    parts = [part]
    for outer in parts:
        for inner in (getattr(outer, name, None) for name in names):
            if inner is not None and all(inner is not known for known in parts):
                parts.append(inner)
    return parts


def _leave_workers_of_parent(loader: Any) -> None:
    """Let a forked rank start its own workers if its parent has persistent ones."""
    iterator: Any = getattr(loader, "_iterator", None)
    if any(worker._parent_pid != os.getpid() for worker in getattr(iterator, "_workers", ())):
        iterator._shutdown = True  # else it would end the workers of the parent
        _of_parent.append(iterator)  # PyTorch knows it by its address, so it must not be freed
        loader._iterator = None


_of_parent: list[Any] = []


def _drawn(
    items: Iterable[Any], seed: int, epoch: int, start: int, passed: int = 0
) -> Iterator[Any]:
    """Generate the items of a sampler or a loader, which may draw random numbers at each, from
    ``start`` on; its first item is number ``passed``. DataError if it ends before ``start``.
    """
    with seeded(seed, epoch, -1):
        iterator = iter(items)
    for number in count(passed):
        with seeded(seed, epoch, number):
            item = next(iterator, iterator)
        if item is iterator:
            if number < start:
                raise too_short(start, epoch, number)
            return
        if number >= start:
            yield item


def _fetched(dataset: Any, samples: Sequence[int], collate: Callable[[Any], Any]) -> Any:
    if isinstance(dataset, Columns) and collate is default_collate:
        return dataset.gather(samples)
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(list(samples)))
    return collate([dataset[sample] for sample in samples])


def _has_transform(dataset: Any) -> bool:
    """Return True if a data set of Hugging Face makes its samples by a function of all columns."""
    described = getattr(dataset, "format", None)
    return isinstance(described, Mapping) and described.get("type") == "custom"


def too_short(start: int, epoch: int, passed: int) -> DataError:
    """Return the error for data that ends before the batch at which training was."""
    return DataError(
        f"training was after batch {start} of epoch {epoch}, which now has only {passed}; resume "
        "with the data and the batch size that it was trained on"
    )
