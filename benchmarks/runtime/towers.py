"""Towers side by side: ours runs the graph as it is; PyTorch's users have to put it in a row.

Each tower is a row of sleeping stages, their ends are added up. The ideal is that of the graph with
a join that costs nothing. Ours has the join ``beside``: a stage of its own on the device of the
first tower's last stage; or ``inside``: a part of that stage, which then waits for the other
towers and adds one to the depth.

In a row, a stage passes on what it does not use: the batch for the towers after it, and the results
of the towers before it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, theirs
from benchmarks.runtime.ops import Wait
from benchmarks.runtime.race import medians, race
from benchmarks.runtime.sleeps import BARE, bare, predicted_s

FORWARD_S, BACKWARD_S = 5e-3, 10e-3
MICROBATCHES = 8
WIDTH = 1024
CASES = ((2, 2), (2, 4), (4, 8))
"""Towers, ranks."""

OURS = ("1f1b", "1f1b-deep", "gpipe")


class Towers(nn.Module):
    """Towers of sleeping stages; the loss is the mean of the sum of their ends."""

    def __init__(self, towers: int, depth: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(Wait(FORWARD_S, BACKWARD_S) for _ in range(depth)) for _ in range(towers)
        )
        self.join = Join()

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> scalar."""
        ends = []
        for tower in self.towers:
            h = x
            for stage in tower:
                h = stage(h)
            ends.append(h)
        return self.join(ends)


class Join(nn.Module):
    """The mean of the sum."""

    def forward(self, ends: list[Tensor]) -> Tensor:
        """[samples, width] each -> scalar."""
        return torch.stack(ends).sum(0).mean()


class InARow(nn.Module):
    """One stage of one tower, in a row of all of them.

    Args:
        is_first: of its tower, whose batch comes along from the stage before.
        following: towers still to come.
    """

    def __init__(self, is_first: bool, following: int) -> None:
        super().__init__()
        self.wait = Wait(FORWARD_S, BACKWARD_S)
        self.is_first, self.following = is_first, following

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The batch if anybody still needs it, the ends of earlier towers, this tower's value."""
        if self.is_first:
            x, *ends = values
            made = self.wait(x)
            return (x, *ends, made) if self.following else (*ends, made)
        *others, h = values
        return (*others, self.wait(h))


def row_of(towers: int, depth: int) -> list[nn.Module]:
    """The modules of the chain."""
    return [InARow(i == 0, towers - 1 - t) for t in range(towers) for i in range(depth)]


def _sum(out: Tensor | tuple[Tensor, ...], _: Tensor) -> Tensor:
    return torch.stack(out if isinstance(out, tuple) else (out,)).sum(0).mean()


def rows(joins: tuple[str, ...] = ("beside", "inside")) -> list[Row]:
    """One row per case and side."""
    return [row for case in CASES for row in _case(*case, joins)]


def _case(towers: int, ranks: int, joins: tuple[str, ...]) -> list[Row]:
    depth = ranks // towers
    batch, example = torch.zeros(MICROBATCHES, WIDTH), torch.zeros(2, WIDTH)
    captured = ours.captured_model(Towers(towers, depth), example)
    plans = {
        f"ours {name}, join {where}": _plan(captured, depth, ranks, name, apart=where == "beside")
        for where in joins
        for name in OURS
    }
    sides = {name: ours.our_side(captured, example, plan, batch) for name, plan in plans.items()}
    for name in ("gpipe", "1f1b"):
        sides[f"torch {name}, in a row"] = theirs.their_side(
            name,
            ranks,
            lambda: row_of(towers, depth),
            _sum,
            batch,
            torch.zeros(MICROBATCHES),
            microbatches=MICROBATCHES,
        )
    sides[BARE] = lambda: bare(Wait(FORWARD_S, BACKWARD_S), batch)
    ideal = (MICROBATCHES + depth - 1) * (FORWARD_S + BACKWARD_S)
    result = []
    found = medians(race(sides, ranks))
    late = found.pop(BARE) / (MICROBATCHES * (FORWARD_S + BACKWARD_S))
    for side, seconds in found.items():
        row: Row = {"towers": towers, "ranks": ranks, "side": side, "step_s": seconds}
        row |= {"ideal_s": ideal, "over_ideal": seconds / ideal}
        if side in plans:
            plan = plans[side]
            count = len(plan.stage_graph)
            busy = [s < ranks for s in range(count)]
            own = [FORWARD_S * b for b in busy], [BACKWARD_S * b for b in busy]
            row["schedule_ideal_s"] = ours.ideal_s(plan, *own)
            profiled = ([late * s for s in each] for each in own)
            row["predicted_s"] = predicted_s(plan, *profiled, nbytes=4 * WIDTH)
        result.append(row)
    return result


def _plan(captured: Captured, depth: int, ranks: int, schedule: str, *, apart: bool) -> Plan:
    # Towers one after the other, the first one last: what holds the join comes after all others.
    towers = ranks // depth
    home = ranks if apart else ranks - 1
    stage_of = _places(depth, towers, home)
    devices = [[d] for d in range(ranks)] + [[ranks - 1]] * apart
    return ours.plan_of(captured, stage_of, devices, microbatches=MICROBATCHES, schedule=schedule)


def _places(depth: int, towers: int, join: int) -> Callable[[str], int]:
    def stage_of(name: str) -> int:
        words = name.split(".")
        if words[0] != "towers":
            return join
        tower = (int(words[1]) - 1) % towers
        return tower * depth + int(words[2])

    return stage_of


def show(found: list[Row]) -> str:
    """Measured over the graph's ideal."""
    lines = [
        [
            f"{row['towers']}",
            f"{row['ranks']}",
            row["side"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['ideal_s'] * 1e3:.0f}",
            f"{row['over_ideal']:.2f}",
        ]
        for row in found
    ]
    return table(["towers", "ranks", "side", "step ms", "graph's ideal ms", "over it"], lines)
