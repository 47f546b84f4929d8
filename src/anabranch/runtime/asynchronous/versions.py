"""Versions of one stage's weights on one rank, and its optimizer.

The parameters are the user's own. Between passes they have the newest version; inside a pass they
have the weights that the policy names (``weights``), in one of two ways (``VersionTracker.keeps``).

Kept: ``parameter.data`` points at the storage that the pass reads. A storage that a unit in flight
has read is never written, because views of it (the transpose that a product saves) wait for the
backward; an update works on a copy if the old version must stay, otherwise in place::

    storages    A  version 1, read by F3 .................. B3     free, then version 4
                B  version 2, read by F4 ............................ B4
                C  version 3

In place: there is one storage, and the backward reads its current content, which is the policy, so
autograd's check is off. A prediction overwrites it, and current weights are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch.checkpoint import Checkpoint
from anabranch.runtime.asynchronous.corrections import CORRECTIONS, Step, rate_of
from anabranch.runtime.asynchronous.prediction import WeightPrediction
from anabranch.weights import Reading, VersionTracker, WeightPolicy

Storage = list[Tensor]
"""One tensor per trainable parameter of the stage."""

_LAST, _MOVED, _VERSION = "asynchronous-last", "asynchronous-moved", "asynchronous-version"


class VersionedWeights:
    """All versions of one stage's weights on one rank, and its optimizer.

    Args:
        scheduler: scheduler of the learning rate, stepped after every update; a prediction uses the
            rate of the next update.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        policy: WeightPolicy,
        *,
        in_flight: int,
        deepest: int,
        scheduler: LRScheduler | None = None,
    ) -> None:
        trainable = {id(p): (name, p) for name, p in parameters.items() if p.requires_grad}
        self._names = tuple(name for name, _ in trainable.values())
        self._parameters = tuple(parameter for _, parameter in trainable.values())
        if self._parameters and optimizer is None:
            raise ValueError(f"parameter {self._names[0]} is trained by no optimizer")
        self._optimizer, self._scheduler = optimizer, scheduler
        self._tracker = VersionTracker(policy, in_flight=in_flight, deepest=deepest)
        self._policy, self._lag = policy, in_flight - 1
        self._kept: dict[str, dict[int, Tensor]] = {
            what: {} for name in policy.corrections for what in CORRECTIONS[name][1]
        }
        self._current: Storage = [parameter.data for parameter in self._parameters]
        self._pointed = self._current
        self._free: list[Storage] = []  # storages that were made and are not in use
        self._num_made = 0
        self._stored: dict[int, Storage] = {}
        self._predicted: dict[int, Storage] = {}
        self._moved: frozenset[int] | None = None
        self._last: Storage | None = None
        self._prediction: WeightPrediction | None = None
        if optimizer is not None and self._tracker.predicts:
            self._prediction = WeightPrediction(optimizer, self._parameters)

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._tracker.version

    @property
    def peak_versions(self) -> int:
        """Most copies of the weights alive at once: current, older and those of corrections."""
        return 1 + self._num_made + sum(self._policy.corrections.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of these copies."""
        return self.peak_versions * sum(t.nbytes for t in self._current)

    def fill(self, number: int) -> None:
        """Begin to fill the empty pipeline; parameters may have been replaced."""
        self._tracker.fill(number)
        self._release()
        self._current = self._pointed = [parameter.data for parameter in self._parameters]

    def forward(self, number: int) -> AbstractContextManager[None]:
        """Context manager that sets parameters to the weights of a mini-batch's forward."""
        return self._reading(number, self._tracker.forward(number))

    def backward(self, number: int) -> AbstractContextManager[None]:
        """Context manager that sets parameters to the weights of a mini-batch's backward."""
        return self._reading(number, self._tracker.backward(number))

    @contextmanager
    def _reading(self, number: int, reading: Reading) -> Iterator[None]:
        if self._tracker.keeps:
            storage = self._reads(number, reading.version, reading.ahead)
            self._point(storage)
            try:
                yield
            finally:
                self._point(self._current)
        elif reading.ahead and self._prediction:
            kept = self._take()
            _copy(self._current, kept)
            try:
                self._predict(self._current, reading.ahead)
                yield
            finally:
                _copy(kept, self._current)
                self._free.append(kept)
        else:
            yield

    def _reads(self, number: int, version: int, ahead: int) -> Storage:
        if not ahead:
            return self._current if version == self.version else self._stored[version]
        if number not in self._predicted:
            predicted = self._predicted[number] = self._take()
            _copy(self._current, predicted)
            self._predict(predicted, ahead)
        return self._predicted[number]

    def _point(self, storage: Storage) -> None:
        """Let the parameters point at a storage."""
        if storage is not self._pointed:
            for parameter, tensor in zip(self._parameters, storage, strict=True):
                parameter.data = tensor
            self._pointed = storage

    @torch.no_grad()
    def _predict(self, weights: Storage, ahead: int) -> None:
        if self._prediction is not None:
            self._prediction.move(
                weights,
                ahead,
                moved=self._moved,
                rate=rate_of(self._policy, self._lag, self.version),
                last=self._last,
            )

    def update(self, *, skip: bool = False, minibatches: int = 1) -> None:
        """Make the next version from ``.grad``, the gradients of the oldest mini-batch in flight.

        Args:
            skip: leave the weights unchanged, which is a version too: for a mini-batch without
                usable gradients, such as one that overflowed in half precision.
            minibatches: mini-batches from which it learns; the scheduler makes as many steps.
        """
        old = self.version
        if self._tracker.finish():
            self._stored[old] = self._current
        self._release()
        if self._parameters:
            if old in self._stored:
                self._current = self._take()
                _copy(self._stored[old], self._current)
                self._point(self._current)
            if not skip:
                self._step(old)
        if self._optimizer is not None and self._scheduler is not None and not skip:
            for _ in range(minibatches):
                self._scheduler.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _take(self) -> Storage:
        """Return a storage with any content."""
        if self._free:
            return self._free.pop()
        self._num_made += 1
        return [torch.empty_like(tensor) for tensor in self._current]

    def _release(self) -> None:
        """Free storages that no pass will read."""
        tracker = self._tracker
        for number in [n for n in self._predicted if n not in tracker.predictions]:
            self._free.append(self._predicted.pop(number))
        for version in [v for v in self._stored if v not in tracker.versions]:
            self._free.append(self._stored.pop(version))

    @torch.no_grad()
    def _step(self, updates: int) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        moved = frozenset(i for i, p in enumerate(self._parameters) if p.grad is not None)
        keeps_update = self._prediction is not None and self._prediction.rule == "last update"
        if keeps_update:
            self._last = self._last or self._take()
            _copy(self._current, self._last)
        # Tensors that autograd has saved of a parameter are in another storage by now, or the
        # policy wants them to change.
        with _unsafe_preserve_version_counter(self._parameters), ExitStack() as corrections:
            step = Step(self._parameters, optimizer, updates, self._lag)
            for correction, kept in map(CORRECTIONS.__getitem__, self._policy.corrections):
                rows = (self._kept[what] for what in kept)
                corrections.enter_context(correction(self._policy, step, *rows))
            optimizer.step()
        self._moved = moved
        if keeps_update and self._last:
            torch._foreach_sub_(self._last, self._current)

    def entries(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint besides the optimizer's state, when drained."""
        tensors: dict[str, Tensor] = {}
        for i, name in enumerate(self._names):
            tensors[f"{_VERSION}/{name}"] = torch.tensor(self.version)
            if self._last is not None:
                tensors[f"{_LAST}/{name}"] = self._last[i].clone()
            if self._moved is not None:
                tensors[f"{_MOVED}/{name}"] = torch.tensor(i in self._moved)
            for what, rows in self._kept.items():
                if i in rows:
                    tensors[f"{what}/{name}"] = rows[i].clone()
        return tensors

    def load(self, saved: Checkpoint) -> None:
        """Load ``entries``; a checkpoint of a synchronous run has only its steps."""
        last, moved, versions = (
            [f"{what}/{name}" for name in self._names if name in set(saved.keys(what))]
            for what in (_LAST, _MOVED, _VERSION)
        )
        # With rounds, stages of another plan may have had different versions.
        updates = [int(saved.tensor(key)) for key in versions]
        self._tracker.fill(max(updates) if updates else saved.progress.step)
        if len(moved) == len(self._names):
            self._moved = frozenset(i for i, key in enumerate(moved) if bool(saved.tensor(key)))
        if last and len(last) == len(self._names):
            self._last = self._last or self._take()
            for key, tensor in zip(last, self._last, strict=True):
                tensor.copy_(saved.tensor(key, like=tensor))
        for what, rows in self._kept.items():
            names = set(saved.keys(what))
            rows |= {
                i: saved.tensor(f"{what}/{name}").to(self._current[i].device)
                for i, name in enumerate(self._names)
                if name in names
            }


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    if source:
        torch._foreach_copy_(list(target), list(source))
