"""Plans: the results of planners, read by simulator, runtime and reports.

``stages`` and ``plan`` are the types. ``edges``, ``slices`` and ``rings`` derive the messages
between stages and the groups of devices that all-reduce gradients. ``in_flight`` and ``check`` are
the conditions of a valid plan.
"""
