"""DAPPLE's objective: the latency of one synchronous step, by its pivot stage (section 4.1).

The pipeline is a row of stages in which every transfer is a stage of its own, with F and B the
seconds of the transfer there and of the gradients back, and nothing to reduce::

    stage    0        (0 to 1)   1        (1 to 2)   2
    F, B     compute  transfer   compute  transfer   compute

The pivot Q is the stage with the fewest bubbles. Forwards reach it (T_w), it does M - 1 further
micro-batches (T_s), and then the last backward runs back to the front while the stages reduce
their gradients as they finish (T_e)::

    T_w = sum of F_s for s <= Q                     T_s = (M - 1) (F_Q + B_Q)
    T_e = max over s of  AR_s + (sum of B_a for s <= a <= Q)       where s <= Q
                         AR_s - (sum of B_a for Q <= a <= s)       where s >  Q
    L   = T_w + T_s + T_e

The pivot is found from the last stage to the first (Algorithm 1): stage s takes over from Q if
``(M - 1) (F_s + B_s)  >  (M - 1) (F_Q + B_Q) + sum of F_a + B_a for s < a < Q``.

So L grows stage by stage from the back, and six numbers describe a suffix of the pipeline
(``Suffix``). Two bounds hold for every L (M micro-batches, x_s = F_s + B_s):

- L >= M * x_s for every stage s. Up to Q: L holds the x of Q and of all up to s, and (M - 1) x_Q
  plus what lies between is at least (M - 1) x_s. Behind Q: x_s is less than x_Q.
- L >= (M - 1) x_Q + (x of what lies before Q), for the pivot Q of any suffix: whatever takes over
  has more.

The paper leaves out what an overlapped all-reduce costs in T_e (section 6.3, "DP Overlap"). Decided
here: the gradients of operator o join one ring once the last micro-batch has gone back through o,
beside the backward of earlier operators. The part after the end of the stage's backward counts::

    AR = max over its operators o of  ring(parameters up to o) - (backward seconds before o)
"""

from __future__ import annotations

from typing import NamedTuple


class Suffix(NamedTuple):
    """Terms of the latency of the last stages of a pipeline.

    Attributes:
        pivot_s: F + B of their pivot.
        between_s: F + B of all these stages before the pivot.
        warm_s: F of all these stages up to the pivot.
        back_s: B of all these stages up to the pivot.
        ending_s: T_e.
        behind_s: lower bound of T_e if the pivot comes before them: the largest AR less the B of
            its stage and of all before it.
    """

    pivot_s: float
    between_s: float
    warm_s: float
    back_s: float
    ending_s: float
    behind_s: float


NOTHING = Suffix(0.0, -1.0, 0.0, 0.0, 0.0, float("-inf"))
"""No stages yet: the first that is prepended becomes the pivot."""


def prepended(
    suffix: Suffix, forward_s: float, backward_s: float, reduce_s: float, num_microbatches: int
) -> Suffix:
    """Return the terms with one more stage in front."""
    both, steady = forward_s + backward_s, num_microbatches - 1
    behind = max(reduce_s, suffix.behind_s) - backward_s
    if steady * both > steady * suffix.pivot_s + suffix.between_s:
        ending = max(reduce_s + backward_s, suffix.behind_s - backward_s)
        return Suffix(both, 0.0, forward_s, backward_s, ending, behind)
    back = suffix.back_s + backward_s
    ending = max(reduce_s + back, suffix.ending_s)
    between, warm = suffix.between_s + both, suffix.warm_s + forward_s
    return Suffix(suffix.pivot_s, between, warm, back, ending, behind)


def latency_s(suffix: Suffix, num_microbatches: int) -> float:
    """Return the latency L of a whole pipeline."""
    return suffix.warm_s + (num_microbatches - 1) * suffix.pivot_s + suffix.ending_s
