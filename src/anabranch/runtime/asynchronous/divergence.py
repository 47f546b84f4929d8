"""Divergence of a run: a loss that climbs, noticed while there is still something to save.

Stale weights make a learning rate that was fine with a flush too large. Means over a few
mini-batches are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch.optim import Optimizer

FACTOR = 10.0
"""Times the smallest mean so far that is called divergence."""

WINDOW = 8
"""Losses of one mean."""


class Divergence:
    """Watches the losses of a run."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._least = float("inf")
        self._has_told = False

    def note(self, loss: float) -> str:
        """Take a loss; once in a run, what is wrong as text, otherwise nothing."""
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        self._least = min(self._least, mean)
        if self._has_told or not 0 < FACTOR * self._least < mean:
            return ""
        self._has_told = True
        count = len(self._recent)
        return (
            f"the loss over the last {count} mini-batches is {mean:.4g}, {mean / self._least:.0f} "
            f"times the smallest such mean, {self._least:.4g}"
        )


def circumstances(policy: str, behind: Sequence[int], optimizer: Optimizer | None) -> str:
    """Describe the settings of a run that diverges, with advice."""
    groups = optimizer.param_groups if optimizer is not None else []
    rates = [float(group["lr"]) for group in groups]
    lr = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates)) or "nothing to learn with"
    stale = ", ".join(f"stage {s}: {updates}" for s, updates in enumerate(behind))
    return (
        f"under policy {policy} the version difference in updates is {stale}; the learning rate "
        f"is {lr}: lower it, or let it rise slowly at the start, clip gradients "
        "(clip_stage_norm, in a run file clip-stage-norm), choose fewer stages or a policy that "
        "predicts, or train with --mode sync"
    )
