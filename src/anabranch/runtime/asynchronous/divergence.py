"""Divergence of a run: a loss that climbs, noticed while there is still something to save.

Stale weights make a learning rate that was fine with a flush too large. Means over a few
mini-batches are compared.
"""

from __future__ import annotations

from collections import deque


class Divergence:
    """Watches the losses of a run.

    Args:
        factor: times the smallest mean so far that is called divergence.
        window: losses of one mean.
    """

    def __init__(self, factor: float = 10.0, window: int = 8) -> None:
        self._factor, self._recent = factor, deque[float](maxlen=window)
        self._least = float("inf")
        self._has_told = False

    def note(self, loss: float) -> str:
        """Take a loss; once in a run, what is wrong as text, otherwise nothing."""
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        self._least = min(self._least, mean)
        if self._has_told or not 0 < self._factor * self._least < mean:
            return ""
        self._has_told = True
        count = len(self._recent)
        return (
            f"the loss over the last {count} mini-batches is {mean:.4g}, {mean / self._least:.0f} "
            f"times the smallest such mean, {self._least:.4g}"
        )
