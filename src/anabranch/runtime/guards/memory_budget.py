"""Predicted peaks of all ranks against the memory that there is, before anything is allocated.

A rank that runs out of memory is killed without a word. So its plan's prediction is compared with
what is free on its GPU, or on the CPU with what its host or container can give (Linux); ranks that
share it add up.

A rank's own parameters are there already, those of other stages are given back when training
starts. A prediction is not exact; what is refused exceeds by more than ``MARGIN``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from anabranch.device import accelerator
from anabranch.device.kinds import kind_of
from anabranch.plans.plan import Plan, memory_text, ranges
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.messages import channels
from anabranch.runtime.process_groups import connection_bytes, device_digest

MARGIN = 1.1
"""What is free has to be exceeded by this factor; predictions are within 10% or so."""

_REMEDY = (
    "plan with a smaller micro-batch, with recomputation or for more devices, or pass "
    "check_memory=False to try it all the same"
)


def lack(plan: Plan, mesh: Mesh, resident_bytes: int, given_bytes: int, place: torch.device) -> str:
    """Check that every rank's peak, if predicted, fits where it runs; return the problem, the same
    text on all ranks, with rank, need and memory, or nothing.

    Args:
        resident_bytes: of this rank's parameters, as far as they are there already.
        given_bytes: of parameters of other stages, given back when training starts.
    """
    peaks = plan.predicted.device_peak_bytes if plan.predicted is not None else ()
    if len(peaks) != mesh.size or not any(peaks):
        return ""
    more = max(peaks[mesh.rank] - resident_bytes, 0)
    home = int.from_bytes(device_digest(place)[:7], "big")
    free = _free(place)
    if free > 0 and mesh.is_on_gpus:  # connections will take from it, outside of the allocator
        pairs = {channel[:2] for channel in channels(plan.stage_graph)}
        free = max(free - connection_bytes(pairs, mesh.size, mesh.rank), 0)
    problem = _beyond_host(mesh.gather([more, given_bytes, free, home]), place.type)
    return f"{problem}; {_REMEDY}" if problem else ""


def _beyond_host(needs: Sequence[Sequence[int]], kind: str) -> str:
    """Describe ranks that exceed the memory that is free now; empty if none does.

    Args:
        needs: for each rank the bytes that it will take, that it gives back when training starts,
            and that are free (negative if unknown); a number of the memory that it takes from.
    """
    homes: dict[int, list[int]] = defaultdict(list)
    for rank, (_, _, free, home) in enumerate(needs):
        if free >= 0:
            homes[home].append(rank)
    for ranks in homes.values():
        takes, gives, frees, _ = zip(*(needs[rank] for rank in ranks), strict=True)
        more, free = sum(takes), min(frees) + sum(gives)
        if more > free * MARGIN:
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)} together"
            where = "the GPU" if kind_of(kind).own_memory else "the host or its container"
            return (
                f"{who} would take {memory_text(more)} more at the peak by the plan's prediction, "
                f"but {where} has {memory_text(free)} free"
            )
    return ""


def _free(place: torch.device) -> int:
    """Return the free bytes of a device's memory; -1 if unknown."""
    if accelerator.has_own_memory(place):
        return accelerator.available_bytes(place)
    limits = [limit for limit in (_host_free(), _container_free()) if limit is not None]
    return min(limits, default=-1)


def _host_free(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that the kernel can give without swapping."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _container_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that a control group leaves, file pages included; None without a limit."""
    try:
        limit, usage = (int((root / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # of no limit the file says "max"
        return None
    stat = root / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    pages = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(limit - usage + pages, 0)
