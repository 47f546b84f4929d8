"""Every planner's prices of a stage are those of the cost model and the simulator, bit by bit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost import CostModel
from anabranch.cost.nested_sets import NestedSets, Pairs
from anabranch.graph.opgraph import LookupTable, Op, OpGraph, Parameter, bits
from anabranch.planner.dapple.tables import RunTables
from anabranch.planner.pipedream.terms import Terms, tiers
from anabranch.planner.piper.prices import DownsetPrices
from anabranch.planner.toolkit.prices import HIDING, UNBOUNDED, MicrobatchPrices, Mode, Part
from anabranch.planner.toolkit.problem import Problem
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.simulator.costs import ModelCosts
from tests.planner.helpers import cost_model, prefixes
from tests.planner.piper.reference import rich_profiles

DEVICES, COUNT = 8, 50
PLENTY = 1e9


@dataclass(frozen=True)
class Case:
    """The operators from ``start`` to ``stop`` as a stage with this mode."""

    profile: Profile
    start: int
    stop: int
    size: int
    mode: Mode

    def cost(self, memory: float = PLENTY) -> CostModel:
        """Nodes of 4 devices, links so slow that they matter."""
        machines = {"node": 4, "memory": int(memory), "bandwidth": 7.0, "card": 3.0}
        return cost_model(self.profile, DEVICES, latency_s=0.3, **machines)

    @property
    def mask(self) -> int:
        return (1 << self.stop) - (1 << self.start)

    @property
    def part(self) -> Part:
        return Part(self.mask, self.mode.replicas, self.mode.recompute)

    def prices(self, cost: CostModel) -> MicrobatchPrices:
        return MicrobatchPrices(
            cost,
            self.size * COUNT,
            self.size,
            (self.mode.replicas,),
            cost.cluster.memory_bytes,
            self.mode.recompute,
        )

    def simulated(self, cost: CostModel, versions: int = 1) -> tuple[ModelCosts, int]:
        """The prices of a plan with this stage, on the first devices, and its place in it."""
        graph, runs = cost.graph, [(0, self.start), (self.start, self.stop)]
        stages, free = [], self.mode.replicas
        for first, last in [*runs, (self.stop, len(graph))]:
            names = tuple(op.name for op in graph.ops[first:last])
            if (first, last) == (self.start, self.stop):
                mine, devices = len(stages), tuple(range(self.mode.replicas))
                stages.append(Stage(names, devices, self.size, recompute=self.mode.recompute))
            elif names:
                stages.append(Stage(names, (free,), self.size))
                free += 1
        pairs = tuple((x, y) for y in range(len(stages)) for x in range(y))
        planned = StageGraph(tuple(stages), tuple(sorted(pairs)), self.size * COUNT)
        return ModelCosts(planned, cost, (versions,) * len(stages)), mine


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any run of the operators of any graph; seconds that no float has exactly."""
    profile = draw(rich_profiles())
    factors = st.floats(1e-3, 3, exclude_min=True)

    def scaled(cost: OpCost) -> OpCost:
        by = draw(factors)
        forward, backward = cost.forward_s, cost.backward_s
        return replace(
            cost,
            forward_s=tuple(by * seconds for seconds in forward),
            backward_s=tuple(by * seconds for seconds in backward),
            weight_s=tuple(by * seconds for seconds in cost.weight_s),
        )

    profile = replace(profile, costs=tuple(map(scaled, profile.costs)))
    start = draw(st.integers(0, len(profile.graph) - 1))
    stop = draw(st.integers(start + 1, len(profile.graph)))
    replicas = draw(st.integers(1, 4))
    mode = Mode(replicas, draw(st.booleans()))
    return Case(profile, start, stop, draw(st.integers(replicas, 8)), mode)


def listed(case: Case, cost: CostModel) -> Iterator[tuple[str, float, int]]:
    """Per planner that knows the mode, its period or load and the largest height in memory."""
    order, mode, prices = range(len(cost.graph)), case.mode, case.prices(cost)
    yield "parts", prices.part_period_s(case.part), prices.part_headroom(case.part)
    if not mode.recompute:
        states = NestedSets(cost, prefixes(order))
        terms = Terms(states, prices, tiers(cost.cluster), DEVICES, accumulate=True)
        height = int(terms.headroom(mode.replicas)[case.start, case.stop])
        yield "pipedream", float("nan"), UNBOUNDED if height >= COUNT else height
        runs = dapple(case, states).runs
        degree = int(runs.index_of[mode.replicas])
        yield "dapple", float("nan"), int(runs.headroom[degree, case.start, case.stop])


def dapple(case: Case, row: NestedSets) -> RunTables:
    """DAPPLE's prices of the runs of a row."""
    problem = Problem(row.cost, case.size * COUNT, any_degree=True)
    return RunTables(row, problem.prices(case.size))


def piper(case: Case, cost: CostModel) -> tuple[float, int]:
    """Piper's load and the largest height; -1 if the stage fits at none."""
    states = NestedSets(cost, prefixes(range(len(cost.graph))))
    found = DownsetPrices(case.prices(cost), states).options(
        Pairs(np.array([case.start]), np.array([case.stop])),
        np.array([DEVICES], dtype=np.int32),
        float("inf"),
    )
    mine = np.flatnonzero(found.mode == int(case.mode.recompute))
    return (found.load_s[mine[0]], int(found.held[mine[0]]) - 1) if len(mine) else (np.nan, -1)


@given(cases())
def test_periods_are_made_of_the_simulators_seconds(case):
    """Compute of the simulator, what crosses the border at the common price, and what a backward
    does not hide of an all-reduce over devices in a row: no planner has its own.

    Two papers have another objective than a period per stage. PipeDream takes the larger of compute
    and of an all-reduce without latency; DAPPLE adds up F, B and the all-reduce along the pipeline.
    What they add up or compare is the same to the last bit.
    """
    cost = case.cost()
    costs, stage = case.simulated(cost)
    n, mode = -(-case.size // case.mode.replicas), case.mode
    compute = sum(costs.compute_s(stage, n))
    border, price = cost.border(case.mask), cost.border_price(mode.replicas)
    comes, goes = border.comes.at(n), border.goes.at(n)
    nbytes = cost.stage_parameter_bytes(bits(case.mask)).summed
    reduce_s = cost.all_reduce_s(nbytes, range(mode.replicas))
    if not cost.tied and mode.replicas > 1 and nbytes:
        (ring,) = (ring for ring in costs.all_reduces() if ring.stages == (stage,))
        assert ring.seconds == reduce_s
    left = max(reduce_s - HIDING * compute, 0.0)
    expected = max(compute, max(comes, goes) * price) + left / COUNT
    for name, period_s, _ in listed(case, cost):
        assert np.isnan(period_s) or period_s == expected, name
    load_s, _ = piper(case, cost)
    assert np.isnan(load_s) or load_s == compute + (comes + goes) * price + reduce_s / COUNT
    if not mode.recompute:
        states = NestedSets(cost, prefixes(range(len(cost.graph))))
        terms = Terms(states, case.prices(cost), tiers(cost.cluster), DEVICES, accumulate=True)
        assert terms.compute_s(mode.replicas)[case.start, case.stop] == compute
        if mode.replicas > 1:
            ring = nbytes * (2 * (mode.replicas - 1) / (terms.tiers[0].bandwidth * COUNT))
            assert terms.reduce_s(0, 1, mode.replicas)[case.start, case.stop] == ring
        runs = dapple(case, states).runs
        k = int(runs.index_of[mode.replicas])
        both = runs.forward_s[k] + runs.backward_s[k]
        assert both[case.stop] - both[case.start] == compute
        rings = runs.rings_s[cost.cluster.ring(range(mode.replicas)).level, k]
        assert rings[case.start, case.stop] == reduce_s
        assert runs.entering[case.start, case.stop] == border.entering.at(case.size)
        assert runs.gradients[case.start, case.stop] == border.leaving_gradients.at(case.size)


def test_tables_are_summed_by_their_rows():
    """Of a table of 1,000 bytes a batch of 100 samples looks up 100 rows of 4 bytes and an index of
    8: two replicas send each other 1,200 bytes, as much as a ring of 600. Every planner says so.
    """
    table = OpGraph((Op("a", ("w",)),), (), (Parameter("w", 1000, table=LookupTable(1, 4)),))
    profile = Profile(table, (1, 2), (OpCost((0.0,) * 2, (0.0,) * 2, 0),), "cpu", "measured")
    case = Case(profile, 0, 1, 2, Mode(2))
    dense = case.cost()
    sparse = replace(dense, sparse_embeddings=True, batch_size=case.size * COUNT)
    for cost, nbytes in ((dense, 1000), (sparse, 600)):
        per_byte, latency_s = cost.all_reduce_price(range(2))
        ring_s = nbytes * per_byte + latency_s
        ((_, period_s, _), *_), (load_s, _) = listed(case, cost), piper(case, cost)
        assert period_s == load_s == ring_s / COUNT
        states = NestedSets(cost, prefixes(range(1)))
        terms = Terms(states, case.prices(cost), tiers(cost.cluster), DEVICES, accumulate=True)
        assert terms.reduce_s(0, 1, 2)[0, 1] == nbytes * (2 / (terms.tiers[0].bandwidth * COUNT))
        runs = dapple(case, states).runs
        assert runs.rings_s[0, 1, 0, 1] == ring_s
        graph = StageGraph((Stage(("a",), (0, 1), case.size),), (), case.size * COUNT)
        (ring,) = ModelCosts(graph, cost).all_reduces()
        assert ring.seconds == ring_s


@given(cases(), st.integers(1, 6), st.integers(1, 4))
def test_memory_is_the_same_to_the_last_byte(case, in_flight, versions):
    """With just the memory that the cost model says every planner fits the stage, with a byte less
    it keeps one micro-batch fewer; the simulator's terms add up to the same.
    """
    shape = {"microbatch_size": case.size, "replicas": case.mode.replicas}
    shape |= {"recompute": case.mode.recompute}
    ops, roomy = list(bits(case.mask)), case.cost()
    need = roomy.device_bytes(ops, in_flight=in_flight, **shape)
    costs, stage = case.simulated(roomy, versions)
    nbytes = costs.flight_bytes(stage, -(-case.size // case.mode.replicas))
    device = costs.graph.stages[stage].devices[-1]
    resident, summed = costs.held_bytes(stage, device)
    on_top = max(in_flight * nbytes.held + nbytes.backward, summed)
    assert resident + on_top == roomy.device_bytes(
        ops, in_flight=in_flight, versions=versions, **shape
    )
    needs = [roomy.device_bytes(ops, in_flight=n, **shape) for n in range(1, COUNT + 1)]
    for memory in (need, need - 1):
        if memory < 1:
            continue
        held = sum(bytes_ <= memory for bytes_ in needs)
        height = UNBOUNDED if held == COUNT else held - 1
        cost = case.cost(memory)
        for name, _, found in listed(case, cost):
            assert found == height, name
        # Piper drops what keeps one micro-batch alone, unless it is the last stage, and does not
        # recompute where everything fits without.
        if held >= 2 and not (case.mode.recompute and held == COUNT):
            assert piper(case, cost)[1] == height
