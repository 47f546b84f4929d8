"""Two ranks that compute nothing, under 1F1B: what does a message take?

Every micro-batch is one message there and one back. The figure is the step over its messages, so
what a system does besides sending is in it. ``cpu`` is the work of the busier rank's processor, all
its threads, again per message.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, theirs
from benchmarks.runtime.ops import Still, verdict
from benchmarks.runtime.race import medians, race
from benchmarks.runtime.sleeps import numbered

CASES = ((4 << 10, 32), (1 << 20, 32), (16 << 20, 16))
"""Bytes of a message, micro-batches of a step."""

SIDES = ("ours 1f1b", "ours 1f1b-deep", "torch 1f1b")


class Two(nn.Module):
    """Two stages that take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Still(), Still()])

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> scalar."""
        return verdict(self.stages[1](self.stages[0](x)))


def rows(cases: tuple[tuple[int, int], ...] = CASES) -> list[Row]:
    """One row per size and side."""
    return [row for case in cases for row in _case(*case)]


def _case(nbytes: int, microbatches: int) -> list[Row]:
    # Nobody reads the batch, so its pages never come to be.
    batch, example = torch.zeros(microbatches, nbytes // 4), torch.zeros(2, nbytes // 4)
    captured = ours.captured_model(Two(), example)
    first = ours.plan_of(captured, numbered(2), [[0], [1]], microbatches=microbatches)
    sides = {
        side: ours.our_side(captured, example, ours.under(first, side.split()[1]), batch)
        for side in SIDES[:2]
    }
    sides[SIDES[2]] = theirs.their_side(
        "1f1b",
        2,
        lambda: [Still(), Still()],
        lambda out, _: verdict(out),
        batch,
        torch.zeros(microbatches),
        microbatches=microbatches,
    )
    found = medians(race(sides, 2, turns=6, steps=5, warm=3))
    cpu = medians(race(sides, 2, turns=2, steps=5, warm=3, clock=time.process_time))
    return [
        {
            "bytes": nbytes,
            "side": side,
            "message_s": seconds / (2 * microbatches),
            "cpu_s": cpu[side] / (2 * microbatches),
            "bytes_per_s": 2 * microbatches * nbytes / seconds,
        }
        for side, seconds in found.items()
    ]


def show(found: list[Row]) -> str:
    """Time, throughput and processor time of a message."""
    groups: dict[int, dict[str, Row]] = {}
    for row in found:
        groups.setdefault(row["bytes"], {})[row["side"]] = row
    lines = [
        [
            f"{nbytes / 1024:g} KB" if nbytes < 1 << 20 else f"{nbytes >> 20} MB",
            *(
                f"{group[s]['message_s'] * 1e6:.0f} us, {group[s]['bytes_per_s'] / 1e9:.2f} GB/s, "
                f"{group[s]['cpu_s'] * 1e6:.0f} us"
                for s in SIDES
            ),
            f"{group[SIDES[2]]['message_s'] / group[SIDES[0]]['message_s']:.2f}",
        ]
        for nbytes, group in groups.items()
    ]
    return table(["message", *SIDES, "torch/ours, 1f1b"], lines)
