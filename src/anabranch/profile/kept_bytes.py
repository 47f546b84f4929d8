"""Bytes that autograd keeps between forward and backward, by the operator that made them.

Storages count, each once; parameters, buffers and the batch are at hand and do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class KeptBytes:
    """Observer that gives saved storages to operators; see ``OpCost.kept_bytes`` for the rule."""

    def __init__(self, num_ops: int, at_hand: Iterable[Tensor]) -> None:
        self.nbytes = [0] * num_ops
        # Storages are told apart by address, so each that was seen has to stay alive.
        self._alive: list[torch.UntypedStorage] = []
        self._maker: dict[int, int | None] = {}
        self._counted: set[int] = set()
        for tensor in at_hand:
            self._claim(tensor, None)

    def forward(self, op: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which what is saved counts."""

        def pack(tensor: Tensor) -> Tensor:
            key = self._claim(tensor, op)
            maker = self._maker[key]
            if maker is not None and key not in self._counted:
                self._counted.add(key)
                self.nbytes[maker] += tensor.untyped_storage().nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def made(self, op: int, outputs: Sequence[Tensor]) -> None:
        """The outputs of an operator are its own, unless they are views of something older."""
        for tensor in outputs:
            self._claim(tensor, op)

    def backward(self, op: int) -> AbstractContextManager[None]:
        """Nothing is saved there."""
        return nullcontext()

    def _claim(self, tensor: Tensor, op: int | None) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._maker:
            self._maker[key] = op
            self._alive.append(storage)
        return key
