"""Bytes that one pass of an operator takes while it runs, and nothing before or after it.

A forward makes results that the next operation reads and nobody keeps; a backward makes gradients
of activations. The loss of a language model has most of them: its backward makes the gradient of
the logarithms and that of the scores, each as large as the scores, with what was kept still there::

    forward     scores --> logarithms (kept)          1 x scores besides what is kept
    backward    gradient of the logarithms --> of the scores      2 x scores
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from anabranch.profile.storages import Storages


class WorkingBytes:
    """Observer that finds the most bytes on top of what is there before a pass of an operator.

    ``see`` has to be shown every tensor that operations make. Gradients of parameters are among
    them, but do not grow with the samples.
    """

    def __init__(self, num_ops: int, at_hand: Iterable[Tensor]) -> None:
        self._storages = Storages((), at_hand)
        self._forward, self._backward = [0] * num_ops, [0] * num_ops
        self.see = self._storages.see

    @contextmanager
    def forward(self, op: int) -> Iterator[None]:
        """Around the forward of an operator."""
        before = self._storages.restart()
        yield
        self._forward[op] = self._storages.peak_bytes - before

    @contextmanager
    def backward(self, op: int, gradients: Sequence[Tensor]) -> Iterator[None]:
        """Around its backward, which the gradients of its outputs have been made for."""
        before = self._storages.restart()
        yield
        made = self._storages.peak_bytes - before
        self._backward[op] = made + sum(g.untyped_storage().nbytes() for g in gradients)

    def nbytes(self, kept: Sequence[int]) -> list[int]:
        """Per operator the most of its passes, of a forward less what it keeps."""
        passes = zip(self._forward, self._backward, kept, strict=True)
        return [max(forward - held, backward, 0) for forward, backward, held in passes]
