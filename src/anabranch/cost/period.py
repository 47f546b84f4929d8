"""Period of a stage: seconds from one micro-batch to the next.

    work     max(forward + backward,  price per byte * max(bytes in, bytes out))
    left     what the last backward, 2/3 of forward + backward, does not hide of the all-reduce
    period   work + left / micro-batches of a step

Compute hides transfers, the last backward hides what it can of the all-reduce, and the rest is
spread over the micro-batches. ``planner`` has other objectives, as published: PipeDream's takes the
larger of all three, Piper's the sum.
"""

from __future__ import annotations

import numpy as np

from anabranch.cost.stage_weights import Number, Traffic

HIDING = 2 / 3
"""Share of a micro-batch's compute that is its backward, which goes on beside an all-reduce."""


def traffic_s(comes: Traffic, goes: Traffic, samples: Number, per_byte_s: Number) -> Number:
    """Seconds of transfers per micro-batch, in the direction that takes longer."""
    if comes.has_fixed or goes.has_fixed:
        return np.maximum(comes.at(samples), goes.at(samples)) * per_byte_s
    return np.maximum(comes.per_sample, goes.per_sample) * samples * per_byte_s


def work_s(compute_s: Number, traffic_s: Number) -> Number:
    """Seconds of compute or of transfers, whichever is more."""
    return np.maximum(compute_s, traffic_s)


def period_s(
    work_s: Number, compute_s: Number, reduce_s: Number, num_microbatches: Number
) -> Number:
    """The formula at the head of this file."""
    left_s = np.maximum(0.0, reduce_s - HIDING * compute_s)
    return work_s + left_s / num_microbatches
