"""Random numbers that depend on a seed alone, whatever was drawn before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits made of several."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Context manager that seeds torch (CPU), numpy and Python, and restores their states."""
    seed, ours = mixed_seed(*parts), torch.default_generator
    before, pythons, numpys = ours.get_state(), random.getstate(), np.random.get_state()
    ours.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        ours.set_state(before)
        random.setstate(pythons)
        np.random.set_state(numpys)
