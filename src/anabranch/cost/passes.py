"""Bytes that a pass of a stage takes besides what its operators keep for their backwards.

Of operators i in the order of the model, on n samples::

    k_i    bytes per sample that the operator keeps
    w_i    bytes per sample that its forward or its backward takes besides, while it runs
    g_i    bytes of the largest gradient of one of its parameters, before it is added

    pass(i) = max(pass(i - 1) - k_i n,  g_i + w_i n)

What operator i keeps is not there yet when those before it run their forwards, and no more when
they run their backwards. So an embedding's gradient, the last to be made, is as large as its table,
but lies where all that the other operators have kept lay before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.cost.stage_weights import Number

Floats = NDArray[np.float64]


def pass_behind(before: float, kept: float, own: float) -> float:
    """pass(i), where pass(i - 1) is ``before``, and ``own`` is what operator i takes itself."""
    return max(before - kept, own)


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Passes of one stage: ``max(fixed + per_sample * samples)`` over its operators, for any
    number of samples.
    """

    fixed: Floats
    per_sample: Floats

    @staticmethod
    def of(gradients: Floats, working: Floats, kept: Floats) -> StagePasses:
        """The recurrence for its operators, g_i, w_i and k_i."""
        return StagePasses(gradients, working - (kept.sum() - np.cumsum(kept)))

    def at(self, samples: Number) -> Number:
        """Bytes for this many samples, or for each of an array of counts."""
        lines = self.fixed + np.multiply.outer(samples, self.per_sample)
        return np.maximum(lines.max(axis=-1, initial=0.0), 0.0)
