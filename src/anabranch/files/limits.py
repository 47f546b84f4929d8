"""Limits of numbers in files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what a file of ours, or of others, may say; more is a mistake.

    Attributes:
        file_bytes: bytes of a file; the profile of a model with 10,000 operators has about
            5 MB.
        size: bytes in memory or on their way: an exbibyte.
        devices: of a cluster; a product of level sizes quickly would be more.
        seconds: of an operator: thirty years.
        samples: of a batch.
        name: characters of a node's label in an operator's name; longer ones are cut.
        microbatches: micro-batches of one stage in a step: thousands make no step faster,
            and each takes memory and time wherever the plan is read.
    """

    file_bytes: int = 2**28
    size: int = 2**60
    devices: int = 10**6
    seconds: float = 1e9
    samples: int = 2**40
    name: int = 40
    microbatches: int = 2**13


LIMITS = Limits()
