"""Peak memory of a rank against the number of micro-batches.

What is measured is the kernel's: the most that was resident in a rank from before its system was
made to the end of the second step, over what was resident before, plus the parameters of its stages
(which are resident before). That has everything in it: activations, gradients, buffers of
messages, shared memory, what the allocator keeps. So that code which is paged in, or small blocks
that the allocator holds back, do not count, each system first runs a step at a small size, and
tensors are given to the kernel as soon as they are free. The peak can be reset on Linux only.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import anabranch
from anabranch import launch
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, theirs
from benchmarks.runtime.race import Side
from benchmarks.runtime.sleeps import numbered

RANKS, DEPTH, WIDTH, SAMPLES = 2, 4, 64, 16384
"""Of a micro-batch one layer keeps 4 MB."""

COUNTS = (4, 8, 16)
OURS, THEIRS = ("gpipe", "1f1b", "1f1b-deep"), ("gpipe", "1f1b")

_M_MMAP_THRESHOLD = -3


class Layers(nn.Sequential):
    """A stage."""

    def __init__(self) -> None:
        super().__init__(*(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Line(nn.Module):
    """Stages in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Layers() for _ in range(RANKS))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> scalar."""
        for stage in self.stages:
            x = stage(x)
        return x.mean()


def rows() -> list[Row]:
    """One row per number of micro-batches and side."""
    return [row for count in COUNTS for row in _case(count)] if sys.platform == "linux" else []


def _case(microbatches: int) -> list[Row]:
    model = Line()
    example = torch.randn(2, WIDTH)
    batch = torch.randn(microbatches * SAMPLES, WIDTH)
    small = torch.randn(2 * microbatches, WIDTH)
    captured = ours.captured_model(model, example)
    profile = anabranch.measure(captured, (SAMPLES,), repeats=1)
    cluster = anabranch.Cluster.preset(f"local:{RANKS}")
    devices = [[d] for d in range(RANKS)]
    held = sum(p.numel() * p.element_size() for p in model.stages[0].parameters())

    def our_pair(name: str) -> tuple[Side, Side]:
        pair = []
        for samples, data in ((2, small), (SAMPLES, batch)):
            plan = ours.plan_of(
                captured,
                numbered(RANKS),
                devices,
                microbatches=microbatches,
                microbatch_size=samples,
                schedule=name,
            )
            # A rank gives up what its plan has elsewhere, so each has a model of its own.
            own = ours.captured_model(copy.deepcopy(model), example)
            pair.append(ours.our_side(own, example, plan, data))
        predicted[f"ours {name}"] = anabranch.simulate(
            plan, profile, cluster, optimizer_factor=0.0
        ).peak_bytes
        return pair[0], pair[1]

    def their_pair(name: str) -> tuple[Side, Side]:
        small_side, side = (
            theirs.their_side(
                name,
                RANKS,
                lambda: list(model.stages),
                lambda out, _: out.mean(),
                data,
                data[:, 0],
                microbatches=microbatches,
            )
            for data in (small, batch)
        )
        return small_side, side

    predicted: dict[str, dict[int, int]] = {}
    pairs = {f"ours {name}": our_pair(name) for name in OURS}
    pairs |= {f"torch {name}": their_pair(name) for name in THEIRS}
    result = []
    for side, pair in pairs.items():
        grown = launch.run(_growth(*pair), RANKS)
        row: Row = {"microbatches": microbatches, "side": side}
        row["peak_bytes"] = [held + each for each in grown]
        if side in predicted:
            row["predicted_bytes"] = list(predicted[side].values())
        result.append(row)
    return result


def _growth(small: Side, side: Side) -> Callable[[], int]:
    def rank() -> int:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
        small()()
        _tidy(libc)
        before = _status("VmRSS")
        step = side()
        _tidy(libc)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        step()
        step()
        return _status("VmHWM") - before

    return rank


def _tidy(libc: ctypes.CDLL) -> None:
    """Give back what is only left over."""
    gc.collect()
    libc.malloc_trim(0)


def _status(field: str) -> int:
    """Bytes of a line of the process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"no {field} in /proc/self/status")


def show(found: list[Row]) -> str:
    """MiB of the first rank, which holds most, measured and predicted."""
    lines = [
        [
            f"{row['microbatches']}",
            row["side"],
            f"{row['peak_bytes'][0] / 2**20:.1f}",
            f"{row['predicted_bytes'][0] / 2**20:.1f}" if "predicted_bytes" in row else "-",
        ]
        for row in found
    ]
    if not found:
        return "left out: the peak of a process can be reset on Linux only"
    return table(["micro-batches", "side", "peak MiB, first rank", "predicted MiB"], lines)
