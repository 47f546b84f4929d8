"""Algorithm 1 against every stage graph that it may express."""

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.planner.graphpipe.chains import line, tree
from anabranch.planner.graphpipe.partitioner import PlannedStage, partition
from anabranch.planner.graphpipe.schedules import Configuration, Schedules, configurations
from anabranch.planner.toolkit.budget import Budget
from anabranch.planner.toolkit.prices import MicrobatchPrices, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.profile.profile import OpCost, Profile
from tests.planner.graphpipe.paper_space import least_period
from tests.planner.helpers import cost_model
from tests.strategies import planning_profiles

LIMITS = {"compute": {}, "traffic and all-reduce": {"bandwidth": 3.0}, "memory": {}}


def prices_of(cost: CostModel, batch_size: int, size: int) -> MicrobatchPrices:
    """Replicas in powers of two, and nothing else."""
    return Problem(cost, batch_size).prices(size)


@given(
    planning_profiles(6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.sampled_from(sorted(LIMITS)),
    st.integers(8, 80),
)
def test_equals_the_best_of_all(profile, devices, size, count, limit, memory):
    """Whatever limits it: no partition and no replicas have a shorter period."""
    tight = {"memory": memory} if limit == "memory" else {}
    cost = cost_model(profile, devices, **LIMITS[limit], **tight)
    prices = prices_of(cost, size * count, size)
    chain = tree(cost, Problem(cost, size * count).tree, 64)
    schedules = Schedules((Configuration(size),), (prices,))
    stages = partition(chain, schedules, devices, 1e-9, Budget("graphpipe", 1e9, ""))
    modes = [schedules.modes[stage.mode] for stage in stages]
    least = least_period(prices, chain, devices)
    if not stages:
        assert least == math.inf
        return
    assert sum(mode.replicas for mode in modes) == devices
    assert sum(stage.mask for stage in stages) == (1 << len(cost.graph)) - 1
    priced = [Part(s.mask, *astuple(mode)) for s, mode in zip(stages, modes, strict=True)]
    assert max(map(prices.part_period_s, priced)) == pytest.approx(least, rel=1e-6)
    assert [s.tps * size for s in stages] == pytest.approx([*map(prices.part_period_s, priced)])


def drawn(times: dict[str, int], reads: dict[str, str]) -> Profile:
    """A model by hand: seconds per sample of each operator, and whom it reads."""
    names = list(times)
    readers: dict[str, list[int]] = {}
    for reader, sources in reads.items():
        for source in sources.split():
            readers.setdefault(source, []).append(names.index(reader))
    values = tuple(Value(names.index(a), tuple(sorted(b)), 0) for a, b in readers.items())
    costs = tuple(OpCost((float(t),), (0.0,), 0) for t in times.values())
    graph = OpGraph(tuple(Op(name) for name in names), values)
    return Profile(graph, (1,), costs, device="cpu", source="measured", proportional=True)


def stages_of(
    profile: Profile, devices: int, *, in_a_row: bool = False, **options: int
) -> list[str]:
    """The stages for micro-batches of one sample, as operators x replicas, sorted."""
    cost = cost_model(profile, devices, **options)
    problem = Problem(cost, 4)
    schedules = Schedules((Configuration(1),), (prices_of(cost, 4, 1),))
    chain = line(cost, problem.order, 64) if in_a_row else tree(cost, problem.tree, 64)
    found = partition(chain, schedules, devices, 1e-6, Budget("graphpipe", 1e9, ""))
    return sorted(_shown(cost, schedules, stage) for stage in found)


def _shown(cost: CostModel, schedules: Schedules, stage: PlannedStage) -> str:
    replicas = schedules.modes[stage.mode].replicas
    return f"{'+'.join(cost.graph.names(stage.mask))} x{replicas}"


Y_SHAPE = {"a2": "a1", "b2": "b1", "join": "a2 b2"}


def test_branches_run_side_by_side():
    """Two branches of two equal operators and a head as long as one, one device each."""
    times = {"a1": 1, "a2": 1, "b1": 1, "b2": 1, "join": 1}
    assert stages_of(drawn(times, Y_SHAPE), 5) == ["a1 x1", "a2 x1", "b1 x1", "b2 x1", "join x1"]


def test_join_takes_the_tail_of_a_branch():
    """A join of no work on three devices: it goes with the second half of a branch."""
    times = {"a1": 2, "a2": 2, "b1": 1, "b2": 1, "join": 0}
    assert stages_of(drawn(times, Y_SHAPE), 3) == ["a1 x1", "a2+join x1", "b1+b2 x1"]


def test_join_takes_a_whole_branch():
    """Two branches and a join of no work on two devices."""
    times = {"a1": 1, "a2": 1, "b1": 1, "b2": 1, "join": 0}
    assert stages_of(drawn(times, Y_SHAPE), 2) == ["a1+a2 x1", "b1+b2+join x1"]


def test_several_branches_in_one_stage():
    """Seven branches on four devices: three pairs, and the seventh with the head."""
    times = {f"b{i}": 2 for i in range(7)} | {"join": 2}
    reads = {"join": " ".join(f"b{i}" for i in range(7))}
    expected = ["b0+b1 x1", "b2+b3 x1", "b4+b5 x1", "b6+join x1"]
    assert stages_of(drawn(times, reads), 4) == expected


def test_memory_lacks_for_the_stage_of_an_inner_join_only():
    """a takes the 16 bytes of a device for its weights, an inner join 1 for each sample.

    So a+join, with end behind it, would hold a sample more than fits, and other stages that last
    two seconds hold as many as they like. On five devices some stage lasts three::

        stem --> pre --> a --------> join --> end
          |       +----> b1 --> b2 --+         |
          +--> c ------------------------------+
    """
    times = dict.fromkeys(["stem", "pre", "a", "b1", "b2", "join", "c", "end"], 1)
    reads = {"pre": "stem", "a": "pre", "b1": "pre", "b2": "b1", "join": "a b2", "c": "stem"}
    profile = drawn(times, {**reads, "end": "join c"})
    ops = [replace(op, parameters=("w",) * (op.name == "a")) for op in profile.graph.ops]
    graph = replace(profile.graph, ops=tuple(ops), parameters=(Parameter("w", 4),))
    pairs = zip(profile.costs, ops, strict=True)
    costs = [replace(cost, kept_bytes=int(op.name == "join")) for cost, op in pairs]
    profile = replace(profile, graph=graph, costs=tuple(costs))
    found = stages_of(profile, 5, memory=16)
    assert found == ["a+b1+b2 x1", "c x1", "join+end x1", "pre x1", "stem x1"]


def test_a_row_has_runs_of_one_order():
    """The same model in a row: a stage may be the tail of one branch and the head of the next."""
    times = {"a1": 2, "a2": 1, "b1": 1, "b2": 2, "join": 2}
    found = stages_of(drawn(times, Y_SHAPE), 4, in_a_row=True)
    assert found == ["a1 x1", "a2+b1 x1", "b2 x1", "join x1"]


def test_a_size_for_every_stage():
    """A first operator that takes 3 s for one sample and 4 s for four, a second of 1 s each.

    One micro-batch size for both takes 3 s per sample (of one) or 1 s (of four), and then keeps
    two micro-batches of four. With a size for each the second runs single samples, and the first
    holds four beyond the one of the second.
    """
    launch = OpCost((3.0, 3.4, 4.0), (0.0,) * 3, 0)
    each = OpCost((1.0, 2.0, 4.0), (0.0,) * 3, 0)
    graph = OpGraph((Op("first"), Op("second")), (Value(0, (1,), 0),))
    cost = cost_model(Profile(graph, (1, 2, 4), (launch, each), "cpu", "measured"), 2)
    chosen = configurations((1, 2, 4), 4)
    sizes = tuple(prices_of(cost, 8, c.microbatch_size) for c in chosen)
    schedules = Schedules(chosen, sizes)
    chain = tree(cost, Problem(cost, 8).tree, 64)
    first, second = partition(chain, schedules, 2, 1e-6, Budget("graphpipe", 1e9, ""))
    assert chosen[first.configuration].microbatch_size == 4
    assert chosen[second.configuration] == Configuration(1)
