"""Plans: the results of planners, read by simulator, runtime and reports.

``stages`` and ``plan`` are the types. ``edges`` derives the values and messages between stages.
``in_flight`` and ``check`` are the conditions of a valid plan.
"""
