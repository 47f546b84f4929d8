"""Rows of sleeping stages under every schedule: how near to its ideal does a system come?

On a busy machine a sleep ends late. ``bare`` shows by how much: every rank runs its stage forward
and backward, micro-batch after micro-batch, without any message. No system can come nearer to its
ideal than that at the time. Predictions rest on it, as those of a plan rest on a measured profile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from anabranch.cluster import Cluster
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.schedule import SPLIT_BACKWARDS, rule_named
from anabranch.simulator.costs import Route, StageTimes
from anabranch.simulator.run import step_seconds
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, theirs
from benchmarks.runtime.ops import SplitWait, Wait
from benchmarks.runtime.race import Side, Step, medians, race

BARE = "bare loop"
OURS = ("gpipe", "1f1b", "1f1b-deep", "1f1b-split", "zb-h1", "zb-h2")
LOOP = "zb-h2 there and back"
"""Two stages on each rank, there and back, but one on the last, where the row turns."""

WIDTH = 1024
"""Numbers per sample: a message has 4 KB."""

CASES = (
    *((ranks, m, 5e-3, 10e-3) for ranks in (2, 4, 8) for m in (8, 16, 32)),
    (4, 32, 1e-3, 2e-3),
)
"""Ranks, micro-batches, seconds of a forward and of a backward."""


class Line(nn.Module):
    """Stages in a row; the loss is the mean of what comes out."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] -> scalar."""
        for stage in self.stages:
            x = stage(x)
        return x.mean()


@dataclass(frozen=True)
class Linked(StageTimes):
    """Stage times with messages of one size over the links of a cluster."""

    cluster: Cluster | None = None
    nbytes: float = 0.0

    def message_bytes(self, source: int, target: int, samples: int) -> tuple[float, float]:
        """The same everywhere."""
        return self.nbytes * samples, self.nbytes * samples

    def route(self, a: int, b: int) -> Route:
        """As the cluster has it."""
        if self.cluster is None:
            return super().route(a, b)
        link = self.cluster.link(a, b)
        return Route(1 / link.bandwidth, link.latency_s, self.cluster.ports(a, b))


def predicted_s(
    plan: Plan, forward_s: list[float], backward_s: list[float], nbytes: float
) -> float:
    """What the simulator says of local ranks that sleep: the cores are not what they share."""
    graph = plan.stage_graph
    costs = Linked(
        [{1: s} for s in forward_s],
        [{1: s} for s in backward_s],
        cluster=Cluster.preset(f"local:{len(graph.devices)}"),
        nbytes=nbytes,
    )
    return step_seconds(graph, rule_named(plan.schedule).order(graph), costs)


def rows(cases: tuple[tuple[int, int, float, float], ...] = CASES) -> Iterator[Row]:
    """One row per case, system and schedule."""
    for case in cases:
        yield from _case(*case)


def chosen(names: Collection[str]) -> Iterator[Row]:
    """The rows of cases with names such as ``4x8``: ranks and micro-batches."""
    return rows(tuple(case for case in CASES if f"{case[0]}x{case[1]}" in names))


def _case(ranks: int, microbatches: int, forward_s: float, backward_s: float) -> list[Row]:
    batch, example = torch.zeros(microbatches, WIDTH), torch.zeros(2, WIDTH)
    plans: dict[str, Plan] = {}
    sides: dict[str, Side] = {}
    for splits, stage in ((False, Wait), (True, SplitWait)):
        module = Line(stage(forward_s, backward_s) for _ in range(ranks))
        captured = ours.captured_model(module, example)
        first = ours.plan_of(
            captured, numbered(ranks), [[d] for d in range(ranks)], microbatches=microbatches
        )
        for name in OURS:
            if (name in SPLIT_BACKWARDS) == splits:
                plans[name] = ours.under(first, name)
                sides[f"ours {name}"] = ours.our_side(captured, example, plans[name], batch)
    module = Line(SplitWait(forward_s * part, backward_s * part) for part in loop_parts(ranks))
    captured = ours.captured_model(module, example)
    plans[LOOP] = loop_plan(captured, ranks, microbatches)
    sides[f"ours {LOOP}"] = ours.our_side(captured, example, plans[LOOP], batch)
    for name in theirs.SCHEDULES:
        sides[f"torch {name}"] = theirs.their_side(
            name,
            ranks,
            lambda name=name: _parts(name, ranks, forward_s, backward_s),
            lambda out, _: out.mean(),
            batch,
            torch.zeros(microbatches),
            microbatches=microbatches,
        )
    sides[BARE] = lambda: bare(Wait(forward_s, backward_s), batch)
    result = []
    times = race(sides, ranks)
    found = medians(times)
    late = found[BARE] / (microbatches * (forward_s + backward_s))
    for side, seconds in found.items():
        system, name = side.split(maxsplit=1)
        parts = loop_parts(ranks) if name == LOOP else [1.0] * ranks
        forwards, backwards = ([s * part for part in parts] for s in (forward_s, backward_s))
        if system == "bare":
            ideal = microbatches * (forward_s + backward_s)
        elif name in theirs.SEVERAL:
            ideal = theirs.ideal_s(name, ranks, microbatches, forward_s, backward_s)
        else:
            ideal = ours.ideal_s(plans[name], forwards, backwards)
        row: Row = {
            "ranks": ranks,
            "microbatches": microbatches,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "system": system,
            "schedule": name,
            "step_s": seconds,
            "least_step_s": min(times[side]),
            "ideal_s": ideal,
            "efficiency": ideal / seconds,
        }
        if system == "ours":
            forwards, backwards = ([s * late for s in each] for each in (forwards, backwards))
            row["predicted_s"] = predicted_s(plans[name], forwards, backwards, nbytes=4 * WIDTH)
        result.append(row)
    return result


def loop_parts(ranks: int) -> list[float]:
    """The work of each stage of ``LOOP``, in times of that of a rank."""
    return [*[0.5] * (ranks - 1), 1.0, *[0.5] * (ranks - 1)]


def loop_plan(captured: Captured, ranks: int, microbatches: int) -> Plan:
    """Stages that go there and back."""
    turns = [*range(ranks), *reversed(range(ranks - 1))]
    plan = ours.plan_of(
        captured, numbered(len(turns)), [[rank] for rank in turns], microbatches=microbatches
    )
    parts = zip(plan.stage_graph.stages, loop_parts(ranks), strict=True)
    stages = tuple(replace(stage, load=part) for stage, part in parts)
    graph = replace(plan.stage_graph, stages=stages)
    return ours.under(replace(plan, stage_graph=graph), LOOP.split()[0])


def numbered(count: int) -> Callable[[str], int]:
    """``stages.2`` -> 2; what follows belongs to the last of so many."""

    def stage_of(name: str) -> int:
        words = name.split(".")
        return int(words[1]) if words[0] == "stages" else count - 1

    return stage_of


def bare(stage: nn.Module, batch: Tensor) -> Step:
    """A stage's computes of one step, and nothing else: what a profile of it would say."""

    def step() -> None:
        for x in batch.split(1):
            y = stage(x)
            y.backward(torch.ones_like(y))

    return step


def _parts(name: str, ranks: int, forward_s: float, backward_s: float) -> list[nn.Module]:
    if name not in theirs.SEVERAL:
        return [Wait(forward_s, backward_s) for _ in range(ranks)]
    halves: list[nn.Module] = [Wait(forward_s / 2, backward_s / 2) for _ in range(2 * ranks)]
    if name == "zbv":
        # PyTorch runs the backward of the very first stage in one piece.
        halves[1:] = [SplitWait(forward_s / 2, backward_s / 2) for _ in halves[1:]]
    return halves


def show(found: list[Row]) -> str:
    """Ideal over measured, per case; the last columns compare the shortest steps."""
    names = [BARE, *(f"ours {name}" for name in (*OURS, LOOP))]
    names += [f"torch {name}" for name in theirs.SCHEDULES]
    groups: dict[tuple[int, int, float], dict[str, Row]] = {}
    for row in found:
        key = row["ranks"], row["microbatches"], row["forward_s"]
        groups.setdefault(key, {})[f"{row['system']} {row['schedule']}"] = row
    lines = []
    for (ranks, m, forward), group in groups.items():
        if len(group) < len(names):  # it was ended in the middle
            continue
        best = {
            system: min(row["step_s"] for row in group.values() if row["system"] == system)
            for system in ("ours", "torch")
        }
        backward = group["ours 1f1b"]["backward_s"]
        lines.append(
            [
                f"{ranks}",
                f"{m}",
                f"{forward * 1e3:g}/{backward * 1e3:g}",
                *(f"{group[name]['efficiency']:.2f}" for name in names),
                *(f"{best[system] * 1e3:.1f}" for system in ("ours", "torch")),
                f"{best['torch'] / best['ours']:.2f}",
            ]
        )
    heads = ["ranks", "micro-batches", "ms", *names, "our best step ms", "torch's", "torch/ours"]
    return table(heads, lines)
