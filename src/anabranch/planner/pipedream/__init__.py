"""PipeDream's planner.

terms       the terms of the recurrence: compute, all-reduce, transfers; what a plan is
recurrence  the recurrence, memory apart
memory      the same under a bound, with the number of stages that may follow
product     the inner loop of both
planner     micro-batch sizes, and plans that fit
"""

from anabranch.planner.pipedream.planner import PipeDream

__all__ = ["PipeDream"]
