"""Calibration of a machine: the few numbers from which steps of its ranks are predicted.

::

    anabranch cluster --calibrate
        pipelines      steps of a model on one and two ranks    -> pass, step, message, all-reduce
        side_by_side   ranks that compute at the same time      -> slowdown
        messages       back and forth between two ranks         -> links
        kept: in the user's cache, which ``local:N`` reads, or as a cluster file

Pipelines and work side by side are measured in processor seconds, which other users of the machine
change little. Measuring imports torch; reading a kept calibration (``machine``, ``kept``) does not.
"""
