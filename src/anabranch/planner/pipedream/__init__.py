"""PipeDream (Narayanan et al., SOSP 2019): the pipeline whose slowest stage is quickest.

terms       the terms of the recurrence: compute, all-reduce, transfers; what a plan is
recurrence  the recurrence, memory apart
memory      the same under a bound, with the number of stages that may follow
product     the inner loop of both
planner     micro-batch sizes, and plans that fit

Axes of tables: u and v, the states before and after a span; s, the state of a cut between them; c,
a choice of components (m or n of them) and stages (p or q).
"""

from anabranch.planner.pipedream.planner import PipeDream

__all__ = ["PipeDream"]
