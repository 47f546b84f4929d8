"""Stages and layers of small graphs, as one would list them by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from anabranch.errors import BudgetError
from anabranch.graph.opgraph import Op, OpGraph, Value, bits
from anabranch.planner.partitioner.exact.lattice import Lattice
from tests.strategies import op_graphs


def graph(n: int, edges: list[tuple[int, int]]) -> OpGraph:
    return OpGraph(
        tuple(Op(f"op{i}") for i in range(n)), tuple(Value(a, (b,), 0) for a, b in edges)
    )


def lattice(g: OpGraph) -> Lattice:
    return Lattice(g, budget=10_000, ways=1_000_000)


def stages(found: Lattice) -> list[str]:
    """All stages once, as digits."""
    masks = {found.mask(pair) for pair in range(len(found.below))}
    return sorted("".join(map(str, bits(mask))) for mask in masks)


def layers(found: Lattice) -> list[str]:
    """Every way to cut a layer in two, as first stage | rest."""
    ways = set()
    for split in found.splits:
        for first, rest in zip(split.first, split.rest, strict=True):
            names = ["".join(map(str, bits(found.mask(int(pair))))) for pair in (first, rest)]
            ways.add(" | ".join(names))
    return sorted(ways)


def test_diamond():
    """0 -> 1, 2 -> 3: the stages are the convex sets; only 1 and 2 lie side by side."""
    found = lattice(graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)]))
    assert stages(found) == ["0", "01", "012", "0123", "02", "1", "12", "123", "13", "2", "23", "3"]
    assert layers(found) == ["1 | 2"]


def test_three_side_by_side():
    """The first stage of a layer holds its first component, and any of the others."""
    found = lattice(graph(3, []))
    assert layers(found) == ["0 | 1", "0 | 12", "0 | 2", "01 | 2", "02 | 1", "1 | 2"]


def test_pieces_from_the_middles_of_two_branches():
    """0 -> 1 -> 2 and 3 -> 4 -> 5: operators 1 and 4 are a stage, and a layer of two stages."""
    found = lattice(graph(6, [(0, 1), (1, 2), (3, 4), (4, 5)]))
    assert "14" in stages(found)
    assert "1 | 4" in layers(found)


def test_more_operators_than_bits_in_a_word():
    """A chain of 70; and one of 60 before two of 5 that lie on both sides of the 64th operator."""
    chain = lattice(graph(70, list(pairwise(range(70)))))
    assert (len(chain.downsets), len(chain.below), chain.splits) == (71, 71 * 70 // 2, ())
    forked = [(59, 60), (59, 65), *((a, a + 1) for a in range(69) if a != 64)]
    two = lattice(graph(70, forked))
    both = {two.mask(int(pair)) for split in two.splits for pair in split.layers}
    runs = [sum(1 << i for i in range(a, b)) for a in range(5) for b in range(a + 1, 6)]
    assert both == {first << 60 | second << 65 for first in runs for second in runs}


@settings(max_examples=60, deadline=None)
@given(op_graphs(max_ops=7))
def test_stages_are_the_convex_sets(g):
    """All of them, and nothing else; a layer's stages are apart and make it up."""
    found = lattice(g)
    masks = {found.mask(pair) for pair in range(len(found.below))}
    assert masks == {m for m in range(1, 1 << len(g)) if g.is_convex(m)}
    for split in found.splits:
        count = len(split.first) // len(split.layers)
        for way, (first, rest) in enumerate(zip(split.first, split.rest, strict=True)):
            parts = found.mask(int(first)), found.mask(int(rest))
            assert sum(parts) == found.mask(int(split.layers[way // count]))
            assert not any((parts[0] >> a & 1) != (parts[0] >> b & 1) for a, b in inside(g, parts))


def inside(g: OpGraph, parts: tuple[int, int]) -> list[tuple[int, int]]:
    """Edges between operators of these sets."""
    both = parts[0] | parts[1]
    return [(a, b) for a, b in g.edges if both >> a & 1 and both >> b & 1]


@pytest.mark.parametrize(("budget", "ways", "message"), [(20, 99, "downsets"), (99, 20, "ways")])
def test_budgets(budget, ways, message):
    """Five operators side by side: 32 downsets; both numbers are named."""
    with pytest.raises(BudgetError, match=rf"{message}.*20"):
        _ = Lattice(graph(5, []), budget=budget, ways=ways).splits
