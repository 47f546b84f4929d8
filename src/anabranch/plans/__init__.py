"""Plans: what planners make and everybody else reads.

``stages`` and ``plan`` are the types, ``edges``, ``slices`` and ``rings`` what flows between stages
and who sums gradients, ``in_flight`` and ``check`` what a plan has to keep to.
"""
