"""Neighbours of a plan: the same stages with one thing changed.

A search under a bound knows the longest period, but a step is more: the way in and out, transfers
that meet at a card, all-reduces that nothing hides. So the best candidates are changed a little,
and what the estimate (``toolkit.estimate``) likes is simulated.

operators      parts of stages go to neighbours; stages become one, or one becomes two
devices        devices go from one stage to another, and stages in a row are cut again
modes          recomputation, tensor-parallel degree
plan_view      the plan that is changed: which of its stages are worth it
polisher       the changes in turn, within a budget
"""
