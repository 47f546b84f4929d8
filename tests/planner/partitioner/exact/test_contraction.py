"""What need not be told apart, and what is put together where there is too much."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.partitioner.exact.contraction import atoms, merged, ordered, quotient
from anabranch.planner.toolkit.parts import PartPrices
from anabranch.profile.profile import OpCost, Profile
from tests.planner.helpers import cluster, cost_model
from tests.planner.partitioner.exact.test_candidates import least_periods, problem_of
from tests.strategies import planning_profiles


def model(times: str, values: dict[str, str], sizes: dict[str, int] | None = None) -> CostModel:
    """A model by hand: a letter and a digit per operator, its name and its seconds.

    ``values`` has per producer the names of its readers; every value has one byte, or its size.
    """
    names, seconds = times[::2], times[1::2]
    readers = {
        names.index(a): tuple(sorted(names.index(b) for b in bs)) for a, bs in values.items()
    }
    graph = OpGraph(
        tuple(Op(name) for name in names),
        tuple(Value(a, bs, (sizes or {}).get(names[a], 1)) for a, bs in readers.items()),
    )
    costs = tuple(OpCost((float(s),), (0.0,), 0) for s in seconds)
    profile = Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)
    return CostModel(profile, cluster(2))


def named(cost: CostModel, groups: tuple[int, ...]) -> list[str]:
    return ["".join(cost.graph.names(mask)) for mask in groups]


@pytest.mark.parametrize(
    ("times", "values", "sizes", "wanted"),
    [
        # an input goes to its reader
        ("i0a1b1", {"i": "a", "a": "b"}, {}, ["ia", "b"]),
        # to the first of several if it has no bytes; it would be sent on otherwise
        ("i0a1b1", {"i": "ab", "a": "b"}, {"i": 0}, ["ia", "b"]),
        ("i0a1b1", {"i": "ab", "a": "b"}, {"i": 1}, ["i", "a", "b"]),
        # no reader is the first
        ("i0a1b1", {"i": "ab"}, {"i": 0}, ["i", "a", "b"]),
        # parts of a tuple stay with it, also those that nobody reads
        ("a1x0y0z0b1", {"a": "xyz", "x": "b"}, {"a": 3}, ["axyz", "b"]),
        # what makes more than it reads goes to its reader
        ("a1x0b1", {"a": "x", "x": "b"}, {"x": 2}, ["a", "xb"]),
        ("a1x0b1c1", {"a": "x", "x": "bc"}, {"x": 2}, ["a", "x", "b", "c"]),
        # something else reads the same value: it has to be sent anyhow
        ("a1x0b1", {"a": "xb", "x": "b"}, {"a": 2}, ["a", "x", "b"]),
        # a free operator between others that are: all of them are one
        ("i0j0a1", {"i": "j", "j": "a"}, {}, ["ija"]),
    ],
)
def test_free_operators(times, values, sizes, wanted):
    """Where each of them goes."""
    cost = model(times, values, sizes)
    assert named(cost, atoms(cost)) == wanted


def test_parameters_are_not_free():
    """An operator without seconds keeps its place if it has bytes that are trained."""
    cost = model("i0a1", {"i": "a"})
    graph = OpGraph((Op("i", ("w",)), Op("a")), cost.graph.values, (Parameter("w", 4),))
    cost = CostModel(Profile(graph, (1,), cost.profile.costs, "cpu", "measured", True), cluster(2))
    assert named(cost, atoms(cost)) == ["i", "a"]


@settings(max_examples=40, deadline=None)
@given(
    st.booleans().flatmap(lambda sp: planning_profiles(6, series_parallel=sp)),
    st.sets(st.integers(0, 5)),
    st.integers(1, 4),
    st.sampled_from([2.0, 1e9]),
)
def test_loses_nothing(profile, free, devices, bandwidth):
    """The least period of all partitions is that of those which leave the atoms whole."""
    costs = tuple(
        OpCost((0.0,) * 4, (0.0,) * 4, 0) if i in free else cost
        for i, cost in enumerate(profile.costs)
    )
    ops = tuple(Op(op.name) if i in free else op for i, op in enumerate(profile.graph.ops))
    graph = OpGraph(ops, profile.graph.values, profile.graph.parameters)
    cost = cost_model(
        Profile(graph, profile.samples, costs, "cpu", "measured"), devices, bandwidth=bandwidth
    )
    groups = atoms(cost)
    everything = least_periods(cost, 8, 4)
    prices = PartPrices(problem_of(cost, 8).prices(4))
    whole = least_periods(
        cost, 8, 4, lambda masks: all(any(group & ~mask == 0 for mask in masks) for group in groups)
    )
    assert prices.microbatch.degrees
    assert min(whole.values()) == pytest.approx(min(everything.values()))


def test_the_lightest_neighbours_become_one():
    """b and c take 2 s together; a and b would take 6; d is beside them, and is put in last."""
    cost = model("a5b1c1d1", {"a": "b", "b": "c"})
    groups = tuple(1 << i for i in range(4))
    sizes = {
        n: named(cost, merged(cost, groups, lambda some, n=n: len(some) <= n)) for n in (3, 2, 1)
    }
    assert sizes == {3: ["a", "bc", "d"], 2: ["abc", "d"], 1: ["abcd"]}


def test_no_circle():
    """a -> b -> c and a -> c: a and c are one only with b."""
    cost = model("a1b5c1", {"a": "bc", "b": "c"})
    assert named(cost, merged(cost, (1, 2, 4), lambda some: len(some) <= 2)) == ["ab", "c"]


@settings(max_examples=60, deadline=None)
@given(planning_profiles(12, series_parallel=False), st.integers(1, 6))
def test_merged_groups_have_an_order(profile, most):
    """They are convex, hold every operator once, and no more are left than asked for."""
    cost = cost_model(profile, 2)
    groups = merged(cost, tuple(1 << i for i in range(len(cost.graph))), lambda g: len(g) <= most)
    assert len(groups) <= most
    assert sum(groups) == (1 << len(cost.graph)) - 1
    assert all(cost.graph.is_convex(mask) for mask in groups)
    assert ordered(cost.graph, reversed(groups)) is not None
    assert len(quotient(cost.graph, groups)) == len(groups)
