"""Prices of stages: seconds of compute, of transfers and all-reduces, and memory of a device.

Each formula stands once and takes numbers or NumPy arrays, so planners and simulator agree to the
last bit. Units are seconds, bytes and samples. A stage on d replicas with micro-batches of b
samples has n = ceil(b / d) samples on its fullest replica:

    forward    sum over operators of forward_s(n)           (linear between measured sample counts)
    backward   sum over operators of backward_s(n)          (+ the forward again with recomputation)
    transfer   latency + bytes / bandwidth                  of the slowest link on the way
    allreduce  2 (d-1)/d * bytes / bandwidth + 2 ceil(log2 d) * latency     (per bucket)
    update     fixed + per parameter + per byte of them
    overheads  of messages at both ends, of passes and of steps, where a cluster was calibrated

``model`` prices one profile on one cluster. ``footprint`` has the bytes of a stage whatever its
micro-batch, ``nested_sets`` those of all stages between nested sets of operators. ``memory`` (of a
device), ``communication`` and ``overheads`` have the formulas.
"""

from anabranch.cost.model import CostModel as CostModel
