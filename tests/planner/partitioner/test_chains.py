"""A model as the search sees it, and made coarser where it is large."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.partitioner import chains
from anabranch.planner.partitioner.chains import Block, Chain, build, count, line, span
from tests.planner import shapes
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles


def leaves(chain: Chain) -> list[int]:
    """Masks of all items that are no blocks."""
    found = []
    for item, mask in zip(chain.items, chain.row.parts, strict=True):
        if isinstance(item, Block):
            for branch in item.branches:
                found += leaves(branch)
        else:
            found.append(mask)
    return found


def test_small_models_stay_as_they_are():
    """Every operator is an item; alike branches are of one class."""
    cost = cost_model(shapes.towers("model", 2, 2, layers=3, top=1), 4)
    chain = build(cost, decompose(cost.graph))
    assert [mask.bit_count() for mask in leaves(chain)] == [1] * len(cost.graph)
    assert count(chain) == len(cost.graph) + 1  # the block is an item too
    assert chain.blocks[0].classes == (0, 0, 2, 2)
    assert span(chain) == 3 + 3


@settings(max_examples=40, deadline=None)
@given(planning_profiles(12), st.integers(2, 6))
def test_coarse_items(profile, items):
    """Each operator in one item; no item of several operators is more than its share of compute."""
    cost = cost_model(profile, 4)
    seconds = [c.forward_s[-1] + c.backward_s[-1] for c in profile.costs]
    before = chains.SEARCH
    chains.SEARCH = replace(before, items=items)
    try:
        chain = build(cost, decompose(cost.graph))
        row = line(cost, operators(decompose(cost.graph)), coarse=True)
    finally:
        chains.SEARCH = before
    for masks in (leaves(chain), list(row.row.parts)):
        together = [op for mask in masks for op in bits(mask)]
        assert sorted(together) == list(range(len(cost.graph)))
        assert all(cost.graph.is_convex(mask) for mask in masks)
        if len(cost.graph) > items:
            for mask in masks:
                share = sum(seconds[op] for op in bits(mask)) / sum(seconds)
                assert mask.bit_count() == 1 or share <= 1 / items + 1e-9
    if len(cost.graph) > items:
        # Neighbours in a row that could be one item are.
        assert len(row.row.parts) <= 2 * items + 1


def test_branches_that_matter_stay_apart():
    """Two long branches and two tables of no work: the tables become one branch."""
    cost = cost_model(shapes.towers("model", 2, 2, layers=150, top=1), 4)
    assert len(cost.graph) > chains.SEARCH.items
    block = build(cost, decompose(cost.graph)).blocks[0]
    assert len(block.branches) == 3
    assert [len(branch.row.parts) > 1 for branch in block.branches] == [True, True, False]
