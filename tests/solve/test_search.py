"""From proposals to a plan: what is chosen, what is said, what is refused."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import planner as planners
from anabranch import solve
from anabranch.cost import CostModel
from anabranch.errors import (
    BudgetError,
    InfeasiblePlanError,
    InvalidPlanError,
    SearchStoppedError,
)
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.schedule import SCHEDULES
from anabranch.simulator.judge import Judge
from anabranch.simulator.run import step_seconds
from anabranch.solve import (
    bottleneck_s_per_sample,
    check_plan,
    comparable,
    compare,
    ideal_step_s,
    options_of,
    plan,
    search,
    simulate,
    simulation,
)
from anabranch.solve.improvement import SearchBudget
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph

GB = 10**9


@dataclass(frozen=True)
class Proposals:
    """A planner that proposes what it was given."""

    graphs: tuple[StageGraph, ...]

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        return self.graphs


@dataclass(frozen=True)
class Limited:
    """A planner with a limit on replicas: two independent operators in one stage or in two."""

    max_replicas: int | None = None

    def __call__(
        self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None
    ) -> Iterator[StageGraph]:
        size = microbatch_size or batch_size
        if self.max_replicas is None:
            yield StageGraph((Stage(("op0", "op1"), (0, 1, 2, 3), size),), (), batch_size)
        else:
            yield stage_graph((), [(0, 1), (2, 3)], batch_size, [size, size])


@pytest.fixture
def propose(monkeypatch):
    """Register proposals under the name ``test``."""

    def register(*graphs: StageGraph, planner=None) -> None:
        table = {"test": planner or (lambda: Proposals(graphs))}
        monkeypatch.setattr(planners, "PLANNERS", table, raising=False)

    return register


def on_chain(num_microbatches: int, **options) -> tuple[CostModel, StageGraph]:
    """Two equal stages, 1 s forward and 1 s backward per sample, and the plan without replicas."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, **options), value_bytes=8)
    return cost, stage_graph(chain(2), [(0,), (1,)], num_microbatches)


def with_size(graph: StageGraph, size: int) -> StageGraph:
    """Another micro-batch size for all stages."""
    stages = tuple(replace(stage, microbatch_size=size) for stage in graph.stages)
    return replace(graph, stages=stages)


def found(cost: CostModel, batch_size: int, **options) -> Plan:
    """The plan of the registered planner."""
    return plan(cost.profile, cost.cluster, batch_size, planner="test", **options)


def test_the_shortest_simulated_step_wins(propose):
    """Micro-batches of 1, 2 and 8 samples: (M + 1)(F + B) is least for the smallest."""
    cost, ones = on_chain(8)
    propose(*(with_size(ones, b) for b in (8, 2, 1)))
    best = found(cost, 8, model="a chain")
    assert [s.microbatch_size for s in best.stage_graph.stages] == [1, 1]
    assert [s.in_flight for s in best.stage_graph.stages] == [2, 1]
    assert best.predicted.step_s == pytest.approx((8 + 1) * 2)
    assert best.predicted.bottleneck_s_per_sample == 2
    assert best.predicted.bubble == pytest.approx(1 / 9)
    assert (best.planner, best.model, best.cluster) == ("test", "a chain", "test")


def test_auto_prefers_the_short_warm_up_where_both_are_equal(propose):
    """With free links depth buys nothing, so the one with less memory stays."""
    cost, graph = on_chain(8)
    propose(graph)
    assert found(cost, 8).schedule == "1f1b"


def test_auto_takes_the_deep_warm_up_where_it_hides_transfers(propose):
    """1 s per message: 2 in flight wait for a round trip of 6 s, 3 in flight do not."""
    cost, graph = on_chain(8, bandwidth=8)
    propose(graph)
    best = found(cost, 8)
    assert best.schedule == "1f1b-deep"
    assert best.stage_graph.stages[0].in_flight == 3
    assert best.predicted.step_s < found(cost, 8, schedule="1f1b").predicted.step_s


def test_auto_stays_within_memory(propose):
    """Deep warm-up would need one micro-batch more than there is room for."""
    graph = stage_graph(chain(2), [(0,), (1,)], 8)

    def with_memory(nbytes: int) -> Plan:
        machines = cluster(2, bandwidth=8, memory_bytes=nbytes)
        cost = cost_model(chain(2), [1, 1], [1, 1], machines, value_bytes=8, kept_bytes=100)
        propose(graph)
        return found(cost, 8)

    assert with_memory(400).schedule == "1f1b-deep"
    assert with_memory(300).schedule == "1f1b"


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_named_schedule_is_the_only_one_tried(propose, schedule):
    """The prediction is what simulating the plan says."""
    cost, graph = on_chain(8, bandwidth=8)
    propose(graph)
    best = found(cost, 8, schedule=schedule)
    timeline = simulate(best, cost.profile, cost.cluster)
    assert best.schedule == schedule
    assert best.predicted.step_s == timeline.step_s
    assert best.predicted.device_peak_bytes == tuple(timeline.peak_bytes.values())


def test_nothing_fits(propose):
    """The message says what would do: 1 GB of weights needs 4 GB with gradients and Adam."""
    cost = cost_model((), [1], [1], cluster(1, memory_bytes=GB), parameter_bytes=GB)
    propose(stage_graph((), [(0,)], 4))
    with pytest.raises(InfeasiblePlanError, match=r"needs 3\.73 GiB on a device, which has 0\.93"):
        found(cost, 4)
    assert found(replace(cost, cluster=cluster(1, memory_bytes=4 * GB)), 4).predicted.step_s == 8


def test_no_proposals(propose):
    """A planner that finds nothing should have raised; the caller still gets a reason."""
    cost, _ = on_chain(4)
    propose()
    with pytest.raises(InfeasiblePlanError, match="proposes nothing"):
        found(cost, 4)


def test_sizes_outside_the_profile_are_left_out(propose):
    """Not an error while another proposal can be priced."""
    cost, graph = on_chain(8)
    measured = replace(cost.profile, proportional=False)
    twos = with_size(graph, 2)
    propose(twos, graph)
    best = plan(measured, cost.cluster, 8, planner="test")
    assert best.stage_graph.stages[0].microbatch_size == 1
    propose(twos)
    with pytest.raises(InfeasiblePlanError, match=r"can be priced: .*says nothing about 2 samples"):
        plan(measured, cost.cluster, 8, planner="test")


def test_proportional_profiles_are_noted(propose):
    """Every figure rests on it."""
    cost, graph = on_chain(4)
    propose(graph)
    assert found(cost, 4).notes == ("times are taken as proportional to samples",)
    assert "proportional" in found(cost, 4).profile


def test_the_limit_on_replicas_reaches_the_planner(propose):
    """Where it has such a field; elsewhere a note says that it was ignored."""
    cost = cost_model((), [1, 1], [1, 1], cluster(4))
    propose(planner=Limited)
    assert found(cost, 4).stage_graph.stages[0].replicas == 4
    assert found(cost, 4, max_replicas=2).stage_graph.stages[0].replicas == 2
    propose(stage_graph((), [(0, 1), (2, 3)], 4, [4, 4]))
    assert any("2 is ignored" in note for note in found(cost, 4, max_replicas=2).notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "nobody"}, "unknown planner 'nobody'; there are test"),
        (
            {"schedule": "2f2b"},
            "unknown schedule '2f2b'; there are 1f1b, 1f1b-deep, gpipe and auto",
        ),
        ({"batch_size": 0}, "batch size is 0"),
        ({"microbatch_size": 0}, "micro-batch size is 0"),
        ({"microbatch_size": 9}, "micro-batch size 9 is larger than the batch size 8"),
        ({"max_replicas": 0}, "number of replicas is 0"),
    ],
)
def test_wrong_arguments(propose, options, message):
    """Before anything is searched."""
    cost, graph = on_chain(8)
    propose(graph)
    arguments = {"batch_size": 8, "planner": "test"} | options
    with pytest.raises(ValueError, match=message):
        plan(cost.profile, cost.cluster, arguments.pop("batch_size"), **arguments)


def a_plan(graph: StageGraph, schedule: str = "1f1b") -> Plan:
    """A plan as a file would hold it."""
    predicted = Prediction(1.0, 1.0, 0.0, (0,) * len(graph.devices))
    warm = SCHEDULES[schedule]().warm_up(graph)
    return Plan(warm, schedule, "test", "m", "test", "p", 0.0, 0.0, predicted)


def test_simulating_another_schedule_uses_its_own_counts():
    """GPipe holds all 8 micro-batches, whatever the plan was made for."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2), kept_bytes=100)
    graph = stage_graph(chain(2), [(0,), (1,)], 8)
    timeline = simulate(a_plan(graph), cost.profile, cost.cluster, schedule="gpipe")
    assert timeline.peak_bytes == {0: 800, 1: 800}
    assert simulate(a_plan(graph), cost.profile, cost.cluster).peak_bytes == {0: 200, 1: 100}


def test_simulating_auto_is_the_faster_one():
    """As plan would choose for this stage graph."""
    cost, graph = on_chain(8, bandwidth=8)
    deep = simulate(a_plan(graph), cost.profile, cost.cluster, schedule="1f1b-deep")
    assert simulate(a_plan(graph), cost.profile, cost.cluster, schedule="auto") == deep


def test_simulating_an_invalid_plan():
    """Every problem is in the message."""
    cost, graph = on_chain(8)
    other = replace(graph, stages=(replace(graph.stages[0], operators=("opX",)), graph.stages[1]))
    with pytest.raises(InvalidPlanError, match=r"opX.*op0"):
        simulate(a_plan(other), cost.profile, cost.cluster)


def test_simulating_on_a_smaller_cluster():
    """A plan is for at least as many devices as it names."""
    cost, graph = on_chain(8)
    with pytest.raises(InvalidPlanError, match="devices"):
        simulate(a_plan(graph), cost.profile, cluster(1))


def test_check_plan_without_a_model():
    """Structure and schedule can be judged from the file alone."""
    graph = stage_graph(chain(2), [(0,), (1,)], 8)
    assert check_plan(a_plan(graph)) == []
    rising = replace(
        a_plan(graph),
        stage_graph=replace(
            graph, stages=tuple(replace(s, in_flight=1 + i) for i, s in enumerate(graph.stages))
        ),
    )
    assert "rises along stage edge 0 -> 1" in check_plan(rising)[0]
    assert "unknown schedule" in check_plan(replace(a_plan(graph), schedule="none"))[0]


def test_check_plan_with_a_model():
    """C1-C4 and memory; one of profile and cluster alone is a mistake."""
    cost, graph = on_chain(8)
    assert check_plan(a_plan(graph), cost.profile, cost.cluster) == []
    problems = check_plan(a_plan(graph), cost.profile, cluster(2, memory_bytes=1))
    assert len(problems) == 2
    assert "GiB on each device" in problems[0]
    with pytest.raises(ValueError, match="both"):
        check_plan(a_plan(graph), cost.profile)


def test_the_ideal_step_has_free_links():
    """(M + S - 1)(F + B) for the plan's schedule and given stage times."""
    graph = stage_graph(chain(3), [(0,), (1,), (2,)], 4)
    assert ideal_step_s(a_plan(graph), [{1: 1.0}] * 3, [{1: 2.0}] * 3) == (4 + 2) * 3


def test_the_ideal_step_waits_along_edges_without_data():
    """An edge that only orders two stages makes them a chain, as in a sequential pipeline."""
    model = cost_model((), [1, 1], [1, 1], cluster(2)).graph
    times = [{1: 1.0}] * 2
    in_a_row = a_plan(stage_graph(((0, 1),), [(0,), (1,)], 1))
    assert ideal_step_s(in_a_row, times, times, model=model) == 4
    side_by_side = a_plan(stage_graph((), [(0,), (1,)], 1))
    assert ideal_step_s(side_by_side, times, times, model=model) == 2


def test_bottleneck():
    """3 s per sample on one device, 8 s on four: the first is slower."""
    cost = cost_model(chain(2), [1, 4], [2, 4], cluster(5))
    graph = stage_graph(chain(2), [(0,), (1, 2, 3, 4)], 8, [4, 4])
    assert bottleneck_s_per_sample(graph, cost) == 3


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.lists(st.sampled_from([1, 2, 4, 16, 64]), min_size=1, max_size=5, unique=True),
    st.sampled_from([1.0, 4.0, 1e9]),
)
def test_pruning_loses_nothing(times, sizes, bandwidth):
    """The winner's step is the least of all proposals, each simulated in full."""
    cost = cost_model(chain(3), times, times, cluster(3, bandwidth=bandwidth), value_bytes=4)
    graphs = [stage_graph(chain(3), [(0,), (1,), (2,)], 128, [b] * 3) for b in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planners, "PLANNERS", {"test": lambda: Proposals(tuple(graphs))}, raising=False
        )
        best = found(cost, 128)
    every = []
    for graph in graphs:
        for name in ("1f1b", "1f1b-deep"):
            rule = SCHEDULES[name]()
            warm = rule.warm_up(graph)
            every.append(step_seconds(warm, rule.order(warm), cost))
    assert best.predicted.step_s == pytest.approx(min(every))


@dataclass(frozen=True)
class Interrupted:
    """A planner whose search is interrupted after some proposals."""

    graphs: tuple[StageGraph, ...]

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        yield from self.graphs
        raise KeyboardInterrupt


def test_an_interrupt_leaves_the_best_so_far(propose):
    """The plan says that the search did not end; without any proposal there is no plan."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Interrupted((with_size(graph, 2), graph)))
    best = found(cost, 8)
    assert best.stage_graph.stages[0].microbatch_size == 1
    assert best.notes[-1] == "interrupted: the best of the first 2 proposals"
    propose(planner=lambda: Interrupted(()))
    with pytest.raises(KeyboardInterrupt):
        found(cost, 8)


@dataclass(frozen=True)
class Improving:
    """Proposes large micro-batches, and half of what is best when asked for more."""

    graph: StageGraph

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        yield with_size(self.graph, 8)

    def neighbourhood(self, cost: CostModel, batch_size: int, microbatch_size: int | None):
        def near(graph: StageGraph) -> list[StageGraph]:
            return [with_size(self.graph, max(1, graph.stages[0].microbatch_size // 2))]

        return near


def test_what_lies_near_the_best_is_tried_until_nothing_is_better(propose):
    """8, then 4, 2 and 1 samples."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Improving(graph))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 1


def test_improvement_can_be_left_out(propose):
    """Then the best proposal is the plan, as it was proposed."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Improving(graph))
    best = found(cost, 8, improve=False)
    assert best.stage_graph.stages[0].microbatch_size == 8
    assert best.improve_s == pytest.approx(0, abs=1e-3)


@dataclass(frozen=True)
class Detour:
    """Proposes a good plan that nothing lies near, and a worse one on the way to the best."""

    graph: StageGraph

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        yield with_size(self.graph, 2)
        yield with_size(self.graph, 8)

    def neighbourhood(self, cost: CostModel, batch_size: int, microbatch_size: int | None):
        nexts = {8: 4, 4: 1}

        def near(graph: StageGraph) -> list[StageGraph]:
            size = graph.stages[0].microbatch_size
            return [with_size(self.graph, nexts[size])] if size in nexts else []

        return near


def test_a_proposal_is_followed_also_while_it_is_behind(propose, monkeypatch):
    """8 samples, then 4, which is still behind 2, then 1, which is best."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Detour(graph))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 1
    monkeypatch.setattr(search, "BUDGET", SearchBudget(improvement=0))
    assert found(cost, 8).stage_graph.stages[0].microbatch_size == 2


@dataclass(frozen=True)
class Published:
    """A planner whose paper fills the pipeline first."""

    graph: StageGraph
    times: int = 1
    schedules: ClassVar[tuple[str, ...]] = ("gpipe",)

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        return [self.graph] * self.times


def test_published_is_the_schedule_of_the_planner(propose):
    """And no other."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Published(graph))
    assert found(cost, 8, schedule="published").schedule == "gpipe"
    assert found(cost, 8).schedule == "1f1b"


def test_options_of_a_planner(propose):
    """By the names of its fields; an unknown name or another kind of value is refused."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Published(graph))
    assert found(cost, 8, planner_options={"times": 3}).schedule == "1f1b"
    with pytest.raises(ValueError, match=r"no option speed; it has graph, times"):
        found(cost, 8, planner_options={"speed": 3})
    with pytest.raises(ValueError, match=r"option times of planner test is True; it takes int"):
        found(cost, 8, planner_options={"times": True})


def test_a_deep_warm_up_is_as_deep_as_memory_allows(propose):
    """Three stages: 5, 3 and 1 micro-batches, or 4, 3 and 1 if there is room for no more."""
    graph = stage_graph(chain(3), [(0,), (1,), (2,)], 16)

    def with_memory(nbytes: int) -> list[int]:
        machines = cluster(3, bandwidth=8, memory_bytes=nbytes)
        cost = cost_model(chain(3), [1, 1, 1], [1, 1, 1], machines, value_bytes=8, kept_bytes=100)
        propose(graph)
        return [s.in_flight for s in found(cost, 16, schedule="1f1b-deep").stage_graph.stages]

    assert with_memory(10_000) == [5, 3, 1]
    assert with_memory(450) == [4, 3, 1]


def test_compare_goes_on_where_one_planner_cannot(propose):
    """Its error takes the place of the plan."""
    cost, graph = on_chain(8)

    def cannot(*_: object, **__: object):
        raise BudgetError("more states than 3")

    propose(graph)
    planners.PLANNERS["costly"] = lambda: cannot
    rows = dict(compare(cost.profile, cost.cluster, 8))
    assert rows["test"].schedule == "1f1b"
    assert str(rows["costly"]) == "more states than 3"
    assert [name for name, _ in compare(cost.profile, cost.cluster, 8, ["test"])] == ["test"]


def test_compare_goes_on_after_an_interrupt(propose):
    """The planner under way has what it proposed, or says that it was interrupted."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Interrupted(()))
    planners.PLANNERS["some"] = lambda: Interrupted((graph,))
    planners.PLANNERS["quick"] = lambda: Proposals((graph,))
    rows = dict(compare(cost.profile, cost.cluster, 8))
    assert isinstance(rows["test"], SearchStoppedError)
    assert rows["some"].notes[-1] == "interrupted: the best of the first 1 proposals"
    assert "interrupted" not in "".join(rows["quick"].notes)


def test_compare_refuses_before_it_searches(propose):
    """A mistake in the options of the last planner does not cost the search of the first."""
    cost, graph = on_chain(8)
    propose(planner=lambda: Published(graph))
    planners.PLANNERS["limited"] = Limited

    def comparing(**options):
        return compare(cost.profile, cost.cluster, 8, **options)

    with pytest.raises(ValueError, match="limited has no option times"):
        comparing(planner_options={"limited": {"times": 2}})
    with pytest.raises(ValueError, match=r"options for limited, but test are compared"):
        comparing(names=["test"], planner_options={"limited": {"max_replicas": 2}})
    with pytest.raises(ValueError, match="unknown planner 'nobody'"):
        comparing(names=["test", "nobody"])
    with pytest.raises(ValueError, match="unknown schedule"):
        comparing(schedule="2f2b")
    assert dict(comparing(planner_options={"test": {"times": 2}})).keys() == {"test", "limited"}


def test_the_limit_on_replicas_twice(propose):
    """As an argument and as an option: neither wins."""
    cost = cost_model((), [1, 1], [1, 1], cluster(4))
    propose(planner=Limited)
    with pytest.raises(ValueError, match=r"given twice, 2 for every planner and 4 as an option"):
        found(cost, 4, max_replicas=2, planner_options={"max_replicas": 4})


def test_what_a_planner_can_be_told():
    """Fields and the types that they take; none for a planner without fields."""
    assert options_of("even") == {"max_replicas": "int | None"}
    assert options_of("data-parallel") == {}


@pytest.mark.parametrize(
    ("operators", "devices", "taken"), [(8, 64, True), (9, 2, False), (2, 65, False)]
)
def test_comparable_planners(operators, devices, taken):
    """All, and ``exhaustive`` where it takes the model and the cluster."""
    cost = cost_model(chain(operators), [1] * operators, [1] * operators, cluster(devices))
    names = comparable(cost.profile, cost.cluster)
    assert [name for name in planners.PLANNERS if name not in names] == (
        [] if taken else ["exhaustive"]
    )


def test_an_interrupt_while_proposals_are_judged_keeps_one(propose, monkeypatch):
    """Nothing has been judged yet: then the first proposal that fits is the plan."""
    cost, graph = on_chain(8)
    propose(with_size(graph, 2), graph)
    whole = Judge.consider

    def consider(self, proposals, allowed=math.inf):
        if len(list(proposals)) > 1:
            raise KeyboardInterrupt
        return whole(self, proposals, allowed)

    monkeypatch.setattr(Judge, "consider", consider)
    best = found(cost, 8)
    assert best.stage_graph.stages[0].microbatch_size == 2
    assert best.notes[-1] == "interrupted: the best of the first 2 proposals"


def test_an_interrupt_at_the_last_moment_keeps_the_plan(propose, monkeypatch):
    """The search is over and the winner simulated once more: one interrupt is too late to count."""
    cost, graph = on_chain(8)
    propose(graph)
    whole, times = simulation.run, []

    def run(*arguments):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(simulation, "run", run)
    assert found(cost, 8).predicted.step_s == pytest.approx((8 + 1) * 2)


def test_a_plan_knows_its_cluster(propose):
    """Not only by name, so that its file is enough to simulate it."""
    cost, graph = on_chain(8)
    propose(graph)
    assert found(cost, 8).machines == cost.cluster


def test_several_stages_on_a_device_are_simulated():
    """A plan made by hand: four stages of 1 s each way on two devices, 8 micro-batches; by turns
    (0 1 0 1) the second device begins after 1 s, in halves (0 0 1 1) after 2 s.
    """
    names = ("op0", "op1", "op2", "op3")
    graph = OpGraph(
        tuple(Op(name) for name in names), tuple(Value(i, (i + 1,), 1) for i in range(3)), ()
    )
    profile = Profile(graph, (1,), (OpCost((1.0,), (1.0,), 0),) * 4, "cpu", "measured")

    two = cluster(2)

    def step_s(devices: tuple[int, ...]) -> float:
        stages = tuple(Stage((n,), (d,), 1) for n, d in zip(names, devices, strict=True))
        ready = SCHEDULES["1f1b"]().warm_up(StageGraph(stages, ((0, 1), (1, 2), (2, 3)), 8))
        nothing = Prediction(0.0, 0.0, 0.0, (0, 0))
        plan = Plan(ready, "1f1b", "by hand", "", "", "", 0.0, 0.0, nothing)
        assert solve.check_plan(plan, profile, two) == []
        return solve.simulate(plan, profile, two).step_s

    assert step_s((0, 1, 0, 1)) < step_s((0, 0, 1, 1)) == pytest.approx(36, abs=1e-6)
