"""Batches of the workload from the position of training on, and the check of each batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anabranch.checkpoint import Progress
from anabranch.data.loaders import Loader, TensorTypes, is_unread, too_short
from anabranch.errors import AnabranchError, DataError, LoaderError, with_line
from anabranch.graph.batch_layout import type_text
from anabranch.graph.capture import Captured
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.runtime.ranks.placement import uploaded
from anabranch.workload import Batch, Workload

HELD_OUT = "held-out data"
_END = object()


class DataFeed:
    """Batches of a workload from the position of training on.

    Attributes:
        step_number: batches trained on, also those of the user's own loop.
        position: batches of the current epoch that were trained on.
        seed: seed of the run, from which ``loaders`` draw.
        fail: called with an error of the data before it is raised.
        state: state of a loader at ``position``, read from a checkpoint; None without one.
        reads: names of a batch's tensors that are needed here; None for all.
        types: sizes and types of tensors that are not needed; None where all are needed.
    """

    def __init__(self, workload: Workload, batch_size: int) -> None:
        self._workload, self._batch_size = workload, batch_size
        self._fetched: int | None = None
        self.step_number = self.epoch = self.position = self.seed = 0
        self.fail: Callable[[BaseException], None] = lambda _: None
        self.state: Mapping[str, Any] | None = None
        self.reads: Callable[[], Collection[str] | None] = lambda: None
        self.types: TensorTypes | None = None

    def loader_state(self) -> dict[str, Any] | None:
        """Return the state of a loader at ``position``, for a checkpoint."""
        data = self._workload.data
        if not isinstance(data, Loader) or not data.has_state or self._fetched is not None:
            return None
        return dict(data.source.state_dict())

    @property
    def where(self) -> str:
        """The batch that was fetched last, as text; empty for batches of the user's own loop."""
        return "" if self._fetched is None else f"batch {self._fetched - 1} of epoch {self.epoch}"

    def batches(self, epochs: int | None) -> Iterator[Batch]:
        """Generate batches, epoch after epoch, without end unless a number of epochs is given."""
        data = self._workload.data
        if data is None:
            raise DataError("the workload has no data; pass batches to step yourself")
        while epochs is None or self.epoch < epochs:
            skip, count = self.position, 0
            what = f"data of epoch {self.epoch}"
            made = partial(data, self._batch_size, self.epoch)
            if isinstance(data, Loader):
                made, count = self._from_here(data), skip
            with POSITION.doing(Phase.DATA), self._naming(what):
                loader = made()
            for batch in self.read(loader, what, Phase.DATA):
                count += 1
                if count > skip:
                    self._fetched = count
                    yield batch
            if count == 0:
                raise DataError(f"epoch {self.epoch} of the data has no batches")
            if count < skip:
                raise too_short(skip, self.epoch, count)
            self.epoch, self.position, self._fetched = self.epoch + 1, 0, None

    def batches_left(self, epochs: int) -> int | None:
        """Count the batches left of so many epochs in all; None where the loader does not say."""
        data = self._workload.data
        count = data.num_batches(self._batch_size) if isinstance(data, Loader) else None
        return None if count is None else max(0, (epochs - self.epoch) * count - self.position)

    def go_on_from(self, progress: Progress) -> None:
        self.step_number, self.seed = progress.step, progress.seed
        self.epoch, self.position = progress.epoch, progress.position
        if progress.data is not None:
            self.state = progress.data

    def _from_here(self, loader: Loader) -> partial[Iterator[Batch]]:
        """Return the call for batches from ``position`` on; a loader skips the others itself."""
        state, self.state = self.state, None  # holds for the position at which it was read
        return partial(
            loader.batches,
            self._batch_size,
            self.epoch,
            start=self.position,
            seed=self.seed,
            state=state,
            reads=lambda: self.reads(),  # which change with the plan
            types=self.types,
        )

    def trained(self) -> None:
        """Note that the batch that was fetched last has been trained on."""
        self.step_number += 1
        if self._fetched is not None:
            self.position, self._fetched = self._fetched, None

    def held_out(self, reads: Collection[str] | None = None) -> Iterable[Batch]:
        """Return the workload's held-out batches; ``reads``: tensors needed here, None for all."""
        data = self._workload.eval_data
        if data is None:
            raise DataError(
                "the workload has no held-out data; give Workload an eval_data, or pass "
                "batches to evaluate"
            )
        made = partial(data, self._batch_size)
        if isinstance(data, Loader):
            made = partial(
                data.batches, data.batch_size or self._batch_size, 0,
                reads=lambda: reads, types=self.types,
            )  # fmt: skip
        with self._naming(HELD_OUT), POSITION.doing(Phase.HELD_OUT):
            return made()

    @contextmanager
    def _naming(self, what: str, when: str = "") -> Iterator[None]:
        """Convert errors of the user's data inside the block into a LoaderError with its line."""
        try:
            yield
        except AnabranchError:
            raise
        except Exception as error:
            named = LoaderError(with_line(f"the {what} raised{when},", error, "its call"))
            self.fail(named)
            raise named from error

    def read(
        self, loader: Iterable[Batch], what: str = HELD_OUT, phase: Phase = Phase.HELD_OUT
    ) -> Iterator[Batch]:
        """Generate a loader's batches; a ``LoaderError`` names the batch and line that raised."""
        iterator = iter(loader)
        count = 0
        while True:
            with self._naming(what, f" at batch {count}"), POSITION.doing(phase):
                batch: Any = next(iterator, _END)
            if batch is _END:
                return
            count += 1
            yield batch


def refusal_of_data(captured: Captured, workload: Workload, batch_size: int) -> str:
    """Return why training would refuse one of the first two batches, or the evaluation the first
    one; empty if it would not. Data that can be read only once is left alone, and so is data with
    buckets, each of which would have to be captured.
    """
    feed, device = DataFeed(workload, batch_size), torch.device("cpu")
    try:
        if _is_read_again(workload.data) and not workload.buckets:
            for _, batch in zip(range(2), feed.batches(1), strict=False):
                leaves_of(captured, batch, device, feed.where)
        if _is_read_again(workload.eval_data) and not workload.buckets:
            for _, batch in zip(range(1), feed.read(feed.held_out()), strict=False):
                leaves_of(captured, batch, device, "held-out batch 0")
    except DataError as error:
        return str(error)
    return ""


def require_first_batch(captured: Captured, workload: Workload, batch_size: int) -> None:
    """Raise the DataError of training for the first batch of a data set; leave other data alone,
    which may take long to begin, and data with buckets.
    """
    data = workload.data
    is_set = isinstance(data, Loader) and data.num_batches(batch_size) is not None
    if is_set and not workload.buckets:
        feed = DataFeed(workload, batch_size)
        leaves_of(captured, next(feed.batches(1)), torch.device("cpu"), feed.where)


def _is_read_again(data: Any) -> bool:
    source = getattr(data, "source", data)
    return source is not None and not isinstance(source, Iterator)


def leaves_of(
    captured: Captured,
    batch: Batch,
    device: torch.device,
    which: str = "",
    *,
    read: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of its leaves; tensors that are ``read`` here, by
    default all, are brought to ``device``.

    Raises:
        DataError: if the batch is built otherwise than the workload's example, or has tensors of
            other types, or of other sizes besides the number of samples, or has another value
            that is no tensor.
    """
    try:
        leaves = captured.layout.flatten(batch)
    except ValueError as error:
        raise DataError(f"{which}: {error}" if which else str(error)) from error
    if changed := captured.for_batch(leaves).layout.changed_values(batch):
        raise DataError(
            f"{which or 'a batch'} differs from the workload's example in what is no tensor: "
            f"{'; '.join(changed[:3])}. Such a value is fixed when the model is captured: give it "
            "as a tensor with an entry per sample, such as torch.full((samples,), value), of which "
            "the forward takes the mean, or leave it out of the batch if the forward does not "
            "need it"
        )
    sizes = {name: leaf.shape[0] if leaf.dim() else 0 for name, leaf in leaves.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(
            f"the tensors of {which or 'a batch'} need one number of samples, at least 1: {listed}"
        )
    types = captured.for_batch(leaves).layout.types
    if any((leaf.shape[1:], leaf.dtype) != types[name] for name, leaf in leaves.items()):
        raise DataError(_differs(captured, leaves, which or "a batch"))
    needed = leaves.keys() if read is None else read
    if unread := [name for name in needed if is_unread(leaves[name])]:
        raise DataError(
            f"{which or 'a batch'} was read without {', '.join(unread)}, which nothing needed here "
            "when it was read, and now something does; take the next batch of the data instead"
        )
    return {n: uploaded(leaf, device) if n in needed else leaf for n, leaf in leaves.items()}


def _differs(captured: Captured, leaves: dict[str, Tensor], which: str) -> str:
    buckets = [captured.variants[sizes] for sizes in sorted(captured.variants)]
    differences, has = [], []
    for name, leaf in leaves.items():
        known = [type_text(*bucket.layout.types[name]) for bucket in buckets]
        has.append(f"{name} {(here := type_text(leaf.shape[1:], leaf.dtype))}")
        if here not in known:
            differences.append(f"{name} is {here}, not {' or '.join(dict.fromkeys(known))}")
    differences = differences or [f"no bucket has {', '.join(has)} together"]
    stacked = {name: leaf for name, leaf in leaves.items() if leaf.dim() > 1}
    if captured.layout.types == {n: (leaf.shape[2:], leaf.dtype) for n, leaf in stacked.items()}:
        return (
            f"each sample of {which} is a batch: {'; '.join(differences)}. What has a length "
            "and an index, as a list has, is taken for a data set of samples; give a list of "
            "batches as a function, lambda *_: batches"
        )
    return (
        f"{which} differs from the workload's example{' and buckets' * (len(buckets) > 1)} in more "
        f"than the number of samples: {'; '.join(differences)}. Give Workload an example that the "
        "loader has yielded, and let the loader yield all batches alike: pad what varies to one "
        "size, or to the next of some that Workload has as buckets (anabranch.pad_to_bucket, see "
        "docs/workloads.md), cut what is longer than all; convert what is of another type"
    )
