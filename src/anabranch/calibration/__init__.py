"""Calibration of a machine: what its links, messages, updates and shared processors cost.

::

    anabranch cluster --calibrate
        ranks --+-- side_by_side   ranks that compute at a time  -> slowdown
                +-- messages       between pairs of ranks        -> links, processor time per byte
                +-- overheads      a pipeline of two ranks       -> message, micro-batch, step
        kept: in the user's cache, which ``local:N`` reads, or as a cluster file

Measuring imports torch; reading what was measured (``machine``, ``kept``) does not.
"""
