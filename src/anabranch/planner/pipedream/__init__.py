"""PipeDream (Narayanan et al., SOSP 2019): the pipeline whose slowest stage is quickest.

terms       the terms of the recurrence: compute, all-reduce, transfers; and the spans of a plan
recurrence  the recurrence without memory, and with it on one level, by the stages that follow
planner     micro-batch sizes, and plans that fit

Axes of tables: u and v, the states before and after a span; s, the state of a cut between them; m
and n, numbers of components.
"""
