"""Ranks that train on one batch: digests of it, and of what replicas have learned.

Every rank takes its slices from the same batch, and copies of a parameter get the same sums. So a
rank with other data, or a copy that has drifted away, is wrong and nothing else shows it::

    first step        everybody's digest, gathered     refused before anything travels
    every step        (digest, its square) in the totals: all are alike if and only if
                      n * sum of squares = square of the sum
    every 100 steps   copies of parameters, gathered
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

DIGEST_BITS = 20
"""Squares of digests, summed over thousands of ranks, are still whole numbers of a float64."""

_SAMPLED = 32
"""Values of each tensor of a batch that its digest has, evenly spread."""


def batch_digest(leaves: Mapping[str, Tensor]) -> bytes:
    """16 bytes from names, types, sizes and some values of a batch; values on a GPU are left out,
    because looking at them would wait for it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in leaves.items():
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)};".encode())
        if leaf.device.type == "cpu" and leaf.numel():
            digest.update(_some_values(leaf.detach()))
    return digest.digest()


def _some_values(leaf: Tensor) -> bytes:
    flat = leaf.view(-1) if leaf.is_contiguous() else leaf[0].flatten()
    some = flat[:: max(flat.numel() // _SAMPLED, 1)].contiguous()
    return bytes(some.view(torch.uint8).numpy())


def small_digest(digest: bytes) -> int:
    """The number of ``DIGEST_BITS`` that stands for a digest in sums."""
    return int.from_bytes(digest[:8], "big") >> (64 - DIGEST_BITS)


def all_alike(count: int, total: float, squares: float) -> bool:
    """Whether so many numbers are one and the same, by their sum and the sum of their squares."""
    return count * int(squares) == int(total) ** 2


def copies_digest(copies: Collection[Tensor]) -> int:
    """A number from all bits of some tensors, the same for equal ones."""
    total = 0
    for position, tensor in enumerate(copies):
        words = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = words[: words.numel() // 4 * 4].view(torch.int32).sum(dtype=torch.int64)
        rest = words[words.numel() // 4 * 4 :].sum(dtype=torch.int64)
        total = (total * 1_000_003 + position + int(whole) * 31 + int(rest)) % 2**62
    return total


def odd_ones(told: Sequence[object], ranks: Sequence[int]) -> str:
    """Who has what the fewest have, as text; empty if all have the same."""
    groups: dict[object, list[int]] = {}
    for rank, value in zip(ranks, told, strict=True):
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return ""
    # Of two equal groups the one with the first rank counts as right.
    most = max(groups.values(), key=lambda group: (len(group), -group[0]))
    odd = sorted(rank for group in groups.values() if group is not most for rank in group)
    named = f"{', '.join(map(str, odd[:8]))}{' ...' if len(odd) > 8 else ''}"
    return f"rank{'s' if len(odd) > 1 else ''} {named} {'have' if len(odd) > 1 else 'has'}"
