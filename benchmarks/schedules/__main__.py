"""Schedules zb-h1 and zb-h2 against the shortest ones on drawn stage graphs; and plans with several
stages on each device.

python -m benchmarks.schedules [--cases 100] [--seed 1] [--verbose] [--transformer]
python -m benchmarks.schedules --loops
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.zero_bubble import ZeroBubble
from benchmarks.schedules import published
from benchmarks.schedules.exact import ListProblem, Seconds, UndecidedError
from benchmarks.schedules.loops import loops

KINDS = {
    "equal stages": (((1, 1, 1),), ((2, 3, 1),), ((2, 1, 3),)),
    "passes of 1 to 3 s": None,
}
"""Seconds of each stage: one of these, the same for all, or drawn."""


@dataclass(frozen=True)
class Result:
    """A schedule and the shortest one, in seconds; None where that is not known."""

    problem: ListProblem
    memory: int
    listed_s: int
    shortest_s: int | None

    @property
    def factor(self) -> float:
        """How many times as long."""
        return self.listed_s / (self.shortest_s or self.listed_s)


def drawn(seed: int) -> Iterator[tuple[StageGraph, int, random.Random]]:
    """Draw chains and branched graphs of 2 to 6 stages with 2 to 8 samples in micro-batches of one,
    in every fourth graph of one or two; and the memory of H1 or of H2.
    """
    draw = random.Random(seed)
    while True:
        count, samples = draw.randint(2, 6), draw.randint(2, 8)
        mixed = draw.random() < 0.25
        sizes = [draw.choice((1, 2)) if mixed else 1 for _ in range(count)]
        edges = {(s - 1, s) for s in range(1, count)}
        if draw.random() < 0.6:
            pairs = [(x, y) for y in range(count) for x in range(y)]
            edges = {(draw.randint(0, y - 1), y) for y in range(1, count)}
            edges |= {pair for pair in pairs if draw.random() < 0.15}
        stages = tuple(Stage((f"op{s}",), (s,), size) for s, size in enumerate(sizes))
        yield StageGraph(stages, tuple(sorted(edges)), samples), draw.choice((1, 2)), draw


def timed(graph: StageGraph, seconds: list[Seconds]) -> StageGraph:
    """Return the stages with the lengths of their passes, as a plan has them."""
    slowest = max(map(sum, seconds))
    stages = (
        replace(
            stage,
            load=(f + i + w) / slowest,
            backward_factor=(i + w) / f,
            weight_share=w / (i + w),
        )
        for stage, (f, i, w) in zip(graph.stages, seconds, strict=True)
    )
    return replace(graph, stages=tuple(stages))


def compared(kind: str, cases: int, seed: int) -> Iterator[Result]:
    """Schedule so many graphs, and find the shortest schedules with the same memory."""
    draws = drawn(seed)
    for _ in range(cases):
        graph, memory, draw = next(draws)
        choices = KINDS[kind]
        whole = [(draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)) for _ in graph.stages]
        seconds = list(draw.choice(choices)) * len(graph) if choices else whole
        graph, rule = timed(graph, seconds), ZeroBubble(memory)
        most = rule.most_in_flight(graph)
        problem = ListProblem(graph, most, seconds, limit_s=20.0)
        filled = rule.warm_up(graph)
        orders = {id(order): order for order in rule.order(filled).actions.values()}
        listed = ListProblem(filled, [s.in_flight for s in filled.stages], seconds)
        listed_s = listed.step_s(orders.values())
        try:
            shortest: int | None = problem.shortest(listed_s)
        except UndecidedError:
            shortest = None
        yield Result(
            replace(problem, graph=with_in_flight(graph, most)), memory, listed_s, shortest
        )


def table(cases: int, seed: int, *, verbose: bool = False) -> str:
    """Compare, and return a table."""
    lines = ["| stages | as short | within 3 % | longest | mean |", "|---|---|---|---|---|"]
    for kind in KINDS:
        results = [r for r in compared(kind, cases, seed) if r.shortest_s is not None]
        factors = [result.factor for result in results]
        equal, near = (sum(x <= 1 + share for x in factors) for share in (1e-9, 0.03))
        row = f"{max(factors):.3f}x | {sum(factors) / len(factors):.4f}x"
        lines.append(f"| {kind} | {equal} of {len(factors)} | {near} | {row} |")
        for r in results if verbose else ():
            if r.factor > 1:
                seconds = f"{r.listed_s} s in place of {r.shortest_s} s, {r.problem.seconds}"
                sys.stdout.write(f"{r.problem.graph.edges}, H{r.memory}: {seconds}\n")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100, help="stage graphs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print those that are longer")
    parser.add_argument("--loops", action="store_true", help="plans with several stages instead")
    parser.add_argument("--transformer", action="store_true", help="also rows of a transformer")
    arguments = parser.parse_args()
    if arguments.loops:
        sys.stdout.write(loops() + "\n")
        return
    text = table(arguments.cases, arguments.seed, verbose=arguments.verbose)
    sys.stdout.write(f"{text}\n")
    if arguments.transformer:
        sys.stdout.write(f"\n{published.table()}\n")


if __name__ == "__main__":
    main()
