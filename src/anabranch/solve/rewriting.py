"""Choice among plans for the same model, as it was written and rewritten."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.plans.plan import Plan

LEAST_GAIN = 0.02
"""Share of the step that a rewrite has to save; less is within the error of measured operators."""


def choose_rewrite(written: Plan | None, rewritten: Sequence[Plan]) -> Plan | None:
    """The plan with the shortest step, that of the model as written unless another saves enough.

    Args:
        written: for the model as it was written; None where no plan of it fits.
    """
    best = min(rewritten, key=lambda plan: plan.figures.step_s, default=None)
    if written is None or best is None:
        return written or best
    is_shorter = best.figures.step_s < (1 - LEAST_GAIN) * written.figures.step_s
    return best if is_shorter else written
