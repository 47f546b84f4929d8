"""A model as Algorithm 1 takes it apart, and made coarser where it is large."""

from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value, bits
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.graphpipe.chains import SeriesChain, line, tree
from anabranch.profile.profile import OpCost, Profile
from tests.planner import shapes
from tests.planner.helpers import cluster, cost_model
from tests.strategies import planning_profiles


def leaves(chain: SeriesChain) -> list[int]:
    """Masks of all items that are no blocks."""
    found = []
    for block, mask in zip(chain.items, chain.row.parts, strict=True):
        if block is None:
            found.append(mask)
        else:
            for place, branch in enumerate(block.branches):
                found += [block.own(mask, place) for mask in leaves(branch)]
    return found


def test_small_models_stay_as_they_are():
    """Every operator is an item; alike branches are one chain."""
    cost = cost_model(shapes.towers("model", 2, 2, layers=3, top=1), 4)
    chain = tree(cost, decompose(cost.graph), 256)
    assert [mask.bit_count() for mask in leaves(chain)] == [1] * len(cost.graph)
    (block,) = (item for item in chain.items if item is not None)
    a, b, c, d = block.branches
    assert a is b is not c is d


def test_branches_that_tie_other_parameters_are_not_alike():
    """Two operators that read one parameter hold half of what two with one each do."""
    ops = [Op(f"op{i}", (name,)) for i, name in enumerate("ttuv")]
    values = tuple(Value(x, (y,), 8) for x, y in ((0, 1), (2, 3), (1, 4), (3, 4)))
    parameters = tuple(Parameter(name, 100) for name in "tuv")
    graph = OpGraph((*ops, Op("join")), values, parameters)
    costs = (OpCost((1.0,), (1.0,), 1),) * 5
    cost = CostModel(Profile(graph, (1,), costs, "cpu", "measured"), cluster(2))
    (block,) = (item for item in tree(cost, decompose(graph), 64).items if item is not None)
    assert block.branches[0] is not block.branches[1]


@given(planning_profiles(12), st.integers(2, 6))
def test_coarse_items(profile, items):
    """Each operator in one item; no item of several operators is more than its share of compute."""
    cost = cost_model(profile, 4)
    seconds = [c.forward_s[-1] + c.backward_s[-1] for c in profile.costs]
    chain = tree(cost, decompose(cost.graph), items)
    row = line(cost, operators(decompose(cost.graph)), items)
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
        assert len(row) <= 2 * items + 1


def test_branches_that_matter_stay_apart():
    """Two long branches and two tables of no work: the tables become one branch."""
    cost = cost_model(shapes.towers("model", 2, 2, layers=150, top=1), 4)
    chain = tree(cost, decompose(cost.graph), 256)
    (block,) = (item for item in chain.items if item is not None)
    assert [len(branch) > 1 for branch in block.branches] == [True, True, False]
