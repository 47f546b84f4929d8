"""Buckets of gradients: how all-reduces are cut into messages, and their order.

Gradients are final in the order of the backwards, last parameters first. So they are summed while
the last backward goes on, a bucket at a time; runtime and simulator ask here for the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

BUCKET_BYTES = 25 * 2**20
"""Most bytes of gradients in one bucket, unless one gradient is larger; PyTorch's default."""

Gradient = TypeVar("Gradient")


def cut_into_buckets(
    gradients: Iterable[Gradient],
    nbytes: Callable[[Gradient], int],
    kind: Callable[[Gradient], Hashable] = lambda _: None,
) -> list[list[Gradient]]:
    """Cut gradients into runs of one kind, of at most ``BUCKET_BYTES``.

    Args:
        gradients: in the order in which they become final: that of the parameters, reversed.
        kind: property that all gradients of a bucket share, such as their element type.
    """
    buckets: list[list[Gradient]] = []
    size = 0
    for gradient in gradients:
        more = nbytes(gradient)
        if not buckets or kind(buckets[-1][0]) != kind(gradient) or size + more > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += more
    return buckets


def piece_bytes(before: float, left: float) -> float:
    """Return the bytes of an all-reduce that are simulated as one piece: an eighth of the bytes
    before or behind it. Pieces are smaller near the ends, as they decide when sums begin and what
    is left after the last backward. A smaller share makes more events, a larger one is coarser.
    """
    return max(BUCKET_BYTES, min(before, left) * 0.125)


def piece_count(nbytes: float, size: float) -> int:
    """Return the number of pieces of about ``size`` bytes, at least one; at most 1024, which a
    parameter of 25 GiB has.
    """
    return max(1, min(1024, round(nbytes / size)))


def all_reduce_order(
    devices: tuple[int, ...], stages: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return the key to sort all-reduces by: those of one set of devices start in the same order on
    all of them, last stages first.
    """
    return devices, -stages[0]
