"""Data sheets of GPUs, and how long a kernel takes on one: a roofline with a utilisation curve.

    seconds = launch + max( compute, bytes / (bandwidth * share that kernels reach) )

A matrix product C[m, n] = A[m, k] B[k, n] is cut into tiles of C, one for each processor at a time:

         n                    132 tiles on 80 processors take two waves, the second one half empty;
      +--+--+--+              8 tiles on 80 processors leave 72 idle, unless k is split as well
    m |  |  |  |  <- waves    or the tiles are smaller, which each do less work per byte they load.
      +--+--+--+

The libraries pick the best tile, and so does this module. Peaks are the vendors' dense ones; shares
are the part of a peak that well tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anabranch.cluster import GB
from anabranch.compiled import Floats


@dataclass(frozen=True)
class DataSheet:
    """Data sheet of one kind of GPU.

    Attributes:
        flops: operations per second (a multiplication and an addition are two) by number format:
            torch's names, and ``tf32`` for float32 on tensor cores. Other formats run as float32.
        bandwidth: bytes per second of its memory.
        processors: streaming multiprocessors.
        launch_s: seconds that each kernel takes at least, on top of its work, in a full queue.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    processors: int
    launch_s: float

    def kernel_s(self, nbytes: Floats, compute_s: Floats, launches: Floats) -> Floats:
        """Return the seconds of kernels from bytes moved, seconds of compute and launches."""
        return launches * self.launch_s + np.maximum(compute_s, nbytes / self.effective_bandwidth)

    def matmul_s(self, m: Floats, n: Floats, k: Floats, batch: Floats, precision: str) -> Floats:
        """Seconds of compute of batched matrix products; it never falls when a size grows."""
        if precision not in self.flops:
            precision = "float32"
        per_processor = self.flops[precision] / self.processors * _REACHED[precision]
        best = np.full(np.shape(m), np.inf)
        for rows, columns, share in _TILES:
            tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
            for split in _SPLITS:
                # To start and end a tile costs about as much as a depth of 32.
                depth = np.maximum(np.ceil(k / split), 32)
                waves = np.ceil(tiles * split / self.processors)
                seconds = waves * (2 * rows * columns * depth) / (per_processor * share)
                if split > 1:  # the parts of the sum are written and read once more
                    seconds = seconds + 2 * 4 * split * m * n * batch / self.effective_bandwidth
                best = np.minimum(best, seconds)
        return np.where(m * n * k * batch > 0, best, 0.0)

    @property
    def effective_bandwidth(self) -> float:
        """Bytes per second that a plain copy reaches."""
        return 0.82 * self.bandwidth


_REACHED = {"float64": 0.9, "float32": 0.9, "tf32": 0.75, "float16": 0.75, "bfloat16": 0.75}
"""Share of the peak that large products reach; tensor cores are harder to feed."""

_TILES = (
    *((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.93), (64, 64, 0.85), (32, 32, 0.6)),
    *((32, 128, 0.85), (128, 32, 0.85), (8, 128, 0.45), (128, 8, 0.45)),  # for few samples
)
"""Rows, columns, and share of ``_REACHED``: smaller tiles load more bytes per operation."""

_SPLITS = (1, 2, 4, 8, 16)


def _flops(float64: float, float32: float, **others: float) -> Mapping[str, float]:
    # From TFLOP/s, as the data sheets print them.
    peaks = {"float64": float64, "float32": float32, **others}
    return {name: 1e12 * peak for name, peak in peaks.items()}


_AMPERE = _flops(9.7, 19.5, tf32=156, float16=312, bfloat16=312)
_HOPPER = _flops(34, 67, tf32=494.5, float16=989.5, bfloat16=989.5)
_BLACKWELL = _flops(40, 80, tf32=1100, float16=2250, bfloat16=2250)
"""Operations per second; of tensor cores without sparsity, half of what some sheets print."""

DATA_SHEETS: Mapping[str, DataSheet] = {
    sheet.name: sheet
    for sheet in (
        # Name, operations per second, bandwidth, memory, processors, launch. All are SXM modules;
        # the V100 has neither TF32 nor bfloat16, which run as float32 then.
        DataSheet("v100", _flops(7.8, 15.7, float16=125), 900 * GB, 80, 5e-6),
        DataSheet("a100", _AMPERE, 2039 * GB, 108, 4e-6),
        DataSheet("h100", _HOPPER, 3350 * GB, 132, 3.5e-6),
        DataSheet("h200", _HOPPER, 4800 * GB, 132, 3.5e-6),
        DataSheet("b200", _BLACKWELL, 8000 * GB, 148, 3.5e-6),
    )
}
"""Kind of device, as in ``Cluster.device`` -> its data sheet."""
