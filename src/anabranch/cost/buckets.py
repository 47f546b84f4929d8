"""Buckets of gradients: what travels in one message of an all-reduce, and in which order.

Gradients are final in the order of the backwards, last parameters first. So they are summed while
the last backward goes on, a bucket at a time; runtime and simulator ask here for the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

BUCKET_BYTES = 25 * 2**20
"""Gradients in one bucket at most, unless a single one is larger; PyTorch's default."""

Gradient = TypeVar("Gradient")


def cut_into_buckets(
    gradients: Iterable[Gradient],
    nbytes: Callable[[Gradient], int],
    kind: Callable[[Gradient], Hashable] = lambda _: None,
) -> list[list[Gradient]]:
    """Runs of one kind, of at most ``BUCKET_BYTES``.

    Args:
        gradients: in the order in which they become final: that of the parameters, reversed.
        kind: what those of one bucket have in common, such as their element type.
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
    """Bytes of an all-reduce that are simulated as one: finer near the ends, which decide when the
    first sum begins and what is left after the last backward. A smaller share than an eighth of the
    bytes before it or after it makes more events, a larger one is coarser.
    """
    return max(BUCKET_BYTES, min(before, left) * 0.125)


def piece_count(nbytes: float, size: float) -> int:
    """Pieces of about ``size`` bytes into which gradients are cut, at least one; at most those of a
    single parameter of 25 GiB.
    """
    return max(1, min(1024, round(nbytes / size)))


def turn(holders: tuple[int, ...], stages: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Key to sort all-reduces by: those of one set of devices start in one order on all of them,
    last stages first.
    """
    return holders, -stages[0]
