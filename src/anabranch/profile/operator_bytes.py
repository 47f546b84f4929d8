"""Bytes that operators keep for their backwards, and bytes that one pass takes while it runs.

Kept bytes are storages that autograd saves, each counted once, for the operator that made it;
parameters, buffers and the batch are there anyway and do not count. A forward also makes results
that only the next operation reads; a backward makes gradients of activations. Both are largest in
the loss of a language model: its backward makes the gradients of the logarithms and of the scores,
each as large as the scores, while the kept logarithms are still there::

    forward     scores --> logarithms (kept)          1 x scores besides what is kept
    backward    gradient of the logarithms --> of the scores      2 x scores
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anabranch.profile.storages import Storages, storages_of

Around = Callable[[int, bool], AbstractContextManager[Any]]
"""(operator, whether the pass is its backward) -> context to enter around the pass."""


class BytesObserver:
    """Observer of a step that adds up bytes by operator; see ``OpCost`` for the rules.

    Args:
        at_hand: tensors that are there anyway: parameters, buffers, the batch.
        around: makes a context that is entered around each pass.

    Attributes:
        kept: bytes that each operator keeps between its forward and its backward.
        see: to be called with every tensor that operations make, also gradients of parameters.
    """

    def __init__(
        self,
        num_ops: int,
        at_hand: Sequence[Tensor],
        around: Around = lambda op, is_backward: nullcontext(),
    ) -> None:
        self.kept = [0] * num_ops
        self._storages, self._around = Storages((), at_hand), around
        self.see = self._storages.see
        self._forward, self._backward = [0] * num_ops, [0] * num_ops
        # Storage -> the operator that made it; None if it is at hand or has been counted.
        self._maker: WeakKeyDictionary[torch.UntypedStorage, int | None] = WeakKeyDictionary()
        self._claim(at_hand, None)

    @contextmanager
    def forward(self, op: int) -> Iterator[None]:
        """Count the bytes of the forward of an operator inside."""

        def save(tensor: Tensor) -> Tensor:
            self._claim([tensor], op)
            for storage in storages_of(tensor):
                maker = self._maker[storage]
                if maker is not None:
                    self.kept[maker] += storage.nbytes()
                    self._maker[storage] = None
            return tensor

        before = self._storages.restart()
        saving = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with saving, self._around(op, False):
            yield
        self._forward[op] = self._storages.peak_bytes - before

    def made(self, op: int, outputs: Iterable[Tensor]) -> None:
        """Take outputs as made by an operator, unless they are views of something older."""
        self._claim(outputs, op)

    @contextmanager
    def backward(self, op: int, gradients: Sequence[Tensor]) -> Iterator[None]:
        """Count the bytes of its backward inside; ``gradients`` of its outputs have arrived."""
        before = self._storages.restart()
        with self._around(op, True):
            yield
        made = self._storages.peak_bytes - before
        self._backward[op] = made + sum(g.untyped_storage().nbytes() for g in gradients)

    @property
    def working(self) -> list[int]:
        """Most bytes of a pass of each operator besides those there before and those it keeps."""
        passes = zip(self._forward, self._backward, self.kept, strict=True)
        return [max(forward - held, backward, 0) for forward, backward, held in passes]

    def _claim(self, tensors: Iterable[Tensor], op: int | None) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._maker.setdefault(storage, op)
