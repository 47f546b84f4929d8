"""Bytes that autograd keeps between forward and backward, by the operator that made them.

Storages count, each once; parameters, buffers and the batch are at hand and do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor


class KeptBytes:
    """Observer that gives saved storages to operators; see ``OpCost.kept_bytes`` for the rule."""

    def __init__(self, num_ops: int, at_hand: Iterable[Tensor]) -> None:
        self.nbytes = [0] * num_ops
        self._maker: WeakKeyDictionary[torch.UntypedStorage, int | None] = WeakKeyDictionary()
        self._counted: WeakSet[torch.UntypedStorage] = WeakSet()
        for tensor in at_hand:
            self._claim(tensor, None)

    def forward(self, op: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which what is saved counts."""

        def pack(tensor: Tensor) -> Tensor:
            storage = self._claim(tensor, op)
            maker = self._maker[storage]
            if maker is not None and storage not in self._counted:
                self._counted.add(storage)
                self.nbytes[maker] += storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def made(self, op: int, outputs: Sequence[Tensor]) -> None:
        """The outputs of an operator are its own, unless they are views of something older."""
        for tensor in outputs:
            self._claim(tensor, op)

    def _claim(self, tensor: Tensor, op: int | None) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        self._maker.setdefault(storage, op)
        return storage
