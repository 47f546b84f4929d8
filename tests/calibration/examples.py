"""A calibration with figures that are easy to add up."""

from typing import Any

from anabranch.calibration.machine import this_machine
from anabranch.cluster import Calibration, Cluster, Level


def calibration(**changed: Any) -> Calibration:
    """Two cores, ranks that slow each other by a half; messages of 2 s at each end."""
    fields: dict[str, Any] = {
        "machine": this_machine(),
        "date": "2026-01-31",
        "slowdown": (1.0, 1.5, 2.25),
        "message_s": 2.0,
        "pass_s": 0.125,
        "step_s": 4.0,
        "all_reduce_byte_s": 0.125,
        "memory_bandwidth": 100.0,
    }
    return Calibration(**{**fields, **changed})


def cluster(devices: int = 2, **changed: Any) -> Cluster:
    """Local ranks with such a calibration."""
    link = Level("host", devices, bandwidth=10.0, latency_s=8.0)
    return Cluster(f"local:{devices}", "cpu", 10**9, (link,), 2, calibration(**changed))
