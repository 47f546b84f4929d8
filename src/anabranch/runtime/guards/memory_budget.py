"""Check of all ranks' predicted peaks against free memory, before anything is allocated.

A rank that runs out of memory is killed without a word. So the prediction of its plan is compared
with the free memory of its GPU, or on the CPU of its host or container (Linux); ranks that share
the memory add up.

A rank's own parameters are there already, parameters of other stages are freed when training
starts. A prediction is not exact, so it is refused only if it exceeds the memory by ``MARGIN``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from anabranch.device import accelerator
from anabranch.device.kinds import kind_of
from anabranch.plans.plan import Plan, memory_text, ranges
from anabranch.runtime.messages import channels
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.process_groups import connection_bytes, device_digest

MARGIN = 1.1
"""Factor by which free memory has to be exceeded; predictions are within 10% or so."""

_REMEDY = (
    "plan with a smaller micro-batch, with recomputation or for more devices, or pass "
    "check_memory=False to try it all the same"
)


def lack(
    plan: Plan, mesh: Mesh, resident_bytes: int, given_bytes: int, device: torch.device
) -> str:
    """Check that every rank's predicted peak fits its memory; return the problem, the same text on
    all ranks, with rank, need and memory, or an empty text.

    Args:
        resident_bytes: bytes of this rank's parameters that are there already.
        given_bytes: bytes of parameters of other stages, which are freed when training starts.
    """
    peaks = plan.predicted.device_peak_bytes if plan.predicted is not None else ()
    if len(peaks) != mesh.size or not any(peaks):
        return ""
    more = max(peaks[mesh.rank] - resident_bytes, 0)
    home = int.from_bytes(device_digest(device)[:7], "big")
    free = _free(device)
    if free > 0 and mesh.is_on_gpus:  # connections will take from it, outside of the allocator
        pairs = {channel[:2] for channel in channels(plan.stage_graph)}
        free = max(free - connection_bytes(pairs, mesh.size, mesh.rank), 0)
    problem = _beyond_host(mesh.gather([more, given_bytes, free, home]), device.type)
    return f"{problem}; {_REMEDY}" if problem else ""


def _beyond_host(needs: Sequence[Sequence[int]], kind: str) -> str:
    """Describe ranks that exceed the memory that is free now; empty if none does.

    Args:
        needs: for each rank the bytes that it will take, that it frees when training starts, and
            that are free (negative if unknown), and a number that identifies the memory.
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


def _free(device: torch.device) -> int:
    """Return the free bytes of a device's memory; -1 if unknown."""
    if accelerator.has_own_memory(device):
        return accelerator.available_bytes(device)
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
    """Return the free bytes of a control group, file pages included; None without a limit."""
    try:
        limit, usage = (int((root / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # without a limit the file has "max"
        return None
    stat = root / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    pages = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(limit - usage + pages, 0)
