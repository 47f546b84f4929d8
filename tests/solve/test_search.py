"""From proposals to a plan: what is chosen, what is said, what is refused."""

import gc
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import planner as planners
from anabranch.cost import CostModel
from anabranch.errors import BudgetError, InfeasiblePlanError, InvalidPlanError, SearchStoppedError
from anabranch.planner.auto.annealing import Annealing
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import UpdateCost
from anabranch.schedule import SCHEDULES
from anabranch.simulator.judge import Judge
from anabranch.simulator.run import step_seconds
from anabranch.solve import comparable, compare, contest, plan, simulate, simulation, step_search
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import Limited, Proposals, Published, found, two_stages, with_size

GB = 10**9


def test_the_shortest_simulated_step_wins(propose):
    """Micro-batches of 1, 2 and 8 samples: (M + 1)(F + B) is least for the smallest."""
    cost, ones = two_stages(8)
    propose(*(with_size(ones, b) for b in (8, 2, 1)))
    best = found(cost, 8, model="a chain")
    assert [s.microbatch_size for s in best.stage_graph.stages] == [1, 1]
    assert [s.in_flight for s in best.stage_graph.stages] == [2, 1]
    assert best.predicted.step_s == pytest.approx((8 + 1) * 2)
    assert best.predicted.bottleneck_s_per_sample == 2
    assert best.predicted.bubble == pytest.approx(1 / 9)
    assert (best.planner, best.model, best.cluster) == ("test", "a chain", "test")
    assert (best.machines, best.notes) == (cost.cluster, ())


def test_auto_takes_the_deep_warm_up_where_it_hides_transfers(propose):
    """1 s per message: 2 in flight wait for a round trip of 6 s, 3 in flight do not."""
    cost, graph = two_stages(8, bandwidth=8)
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
    cost, graph = two_stages(8, bandwidth=8)
    propose(graph)
    best = found(cost, 8, schedule=schedule)
    timeline = simulate(best, cost.profile, cost.cluster)
    assert best.schedule == schedule
    assert best.predicted.step_s == timeline.step_s
    assert best.predicted.device_peak_bytes == tuple(timeline.peak_bytes.values())


def test_nothing_fits(propose):
    """The message says what would do: 1 GB of weights needs 4 GB with gradients and Adam, and 1 GB
    of a gradient before it is added.
    """
    cost = cost_model((), [1], [1], cluster(1, memory_bytes=GB), parameter_bytes=GB)
    propose(stage_graph((), [(0,)], 4))
    with pytest.raises(InfeasiblePlanError, match=r"needs 4\.66 GiB on a device, which has 0\.93"):
        found(cost, 4)
    assert found(replace(cost, cluster=cluster(1, memory_bytes=5 * GB)), 4).predicted.step_s == 8


def test_replicas_share_the_state_of_the_optimizer_where_nothing_fits_without(propose):
    """Two parameters of 1 GB take 9 GB on each of two replicas with gradients and Adam, and 7 GB
    with the state of one of them. Asked not to share, nothing fits; with memory nobody shares.
    """
    machines = cluster(2, memory_bytes=8 * GB)
    cost = cost_model(chain(2), [1, 1], [1, 1], machines, parameter_bytes=GB)
    propose(StageGraph((Stage(("op0", "op1"), (0, 1), 2),), (), 4))
    shared = found(cost, 4)
    assert shared.shard_optimizer
    assert "a shard of the optimizer's state" in shared.summary()
    assert max(shared.predicted.device_peak_bytes) == 7 * GB
    assert simulate(shared, cost.profile, machines).step_s == shared.predicted.step_s
    with pytest.raises(InfeasiblePlanError, match="none of the"):
        found(cost, 4, shard_optimizer=False)
    roomy = replace(cost, cluster=cluster(2, memory_bytes=12 * GB))
    assert not found(roomy, 4).shard_optimizer
    assert found(roomy, 4, shard_optimizer=True).shard_optimizer


def test_auto_finds_data_parallelism_that_fits_only_with_shared_state():
    """A stage per operator fits as it is, but one of them has four times the work."""
    machines = cluster(2, memory_bytes=8 * GB, bandwidth=GB)
    cost = cost_model(chain(2), [1, 4], [1, 4], machines, parameter_bytes=GB)
    apart = plan(cost.profile, machines, 4, shard_optimizer=False)
    together = plan(cost.profile, machines, 4)
    replicated = plan(cost.profile, machines, 4, planner="data-parallel")
    assert len(apart.stage_graph) == 2
    assert together.shard_optimizer
    assert together.predicted.step_s == replicated.predicted.step_s < apart.predicted.step_s


def test_a_search_begins_with_a_plan_that_fits_only_with_shared_state():
    """It is no worse than that plan, which does not fit without."""
    machines = cluster(2, memory_bytes=8 * GB, bandwidth=GB)
    cost = cost_model(chain(2), [1, 4], [1, 4], machines, parameter_bytes=GB)
    together = plan(cost.profile, machines, 4)
    again = plan(cost.profile, machines, 4, start=together)
    assert again.shard_optimizer
    assert again.predicted.step_s <= together.predicted.step_s
    with pytest.raises(InvalidPlanError, match="try a smaller micro-batch"):
        plan(cost.profile, machines, 4, start=together, shard_optimizer=False)


def test_replicas_share_the_state_of_the_optimizer_where_updates_take_long(propose):
    """1 s for each of 32 bytes on both of two replicas, or for 16 on each, which they then send to
    each other in half of the all-reduce of 2 s. A ten-thousandth of that is not worth it.
    """

    def cost(byte_s):
        machines = cluster(2, bandwidth=16)
        priced = cost_model(chain(2), [1, 1], [1, 1], machines, parameter_bytes=16)
        return replace(priced, profile=replace(priced.profile, update=UpdateCost(0, 0, byte_s)))

    propose(StageGraph((Stage(("op0", "op1"), (0, 1), 2),), (), 4))
    slow = cost(1.0)
    shared, alone = found(slow, 4), found(slow, 4, shard_optimizer=False)
    assert shared.shard_optimizer
    assert alone.predicted.step_s - shared.predicted.step_s >= 15
    assert simulate(shared, slow.profile, slow.cluster).step_s == shared.predicted.step_s
    assert not found(cost(0.0001), 4).shard_optimizer


@pytest.mark.parametrize(("parameter_bytes", "searched"), [(0, False), (1000, True)])
def test_nothing_is_searched_beyond_a_plan_as_short_as_the_bound(
    monkeypatch, parameter_bytes, searched
):
    """Data parallelism where no gradients are summed; with gradients it is far from the bound."""
    annealed = []
    monkeypatch.setattr(Annealing, "search", lambda *_: annealed.append(0))
    cost = cost_model(
        chain(4), [1] * 4, [1] * 4, cluster(2, bandwidth=100.0), parameter_bytes=parameter_bytes
    )
    best = plan(cost.profile, cost.cluster, 8, optimizer_factor=0.0)
    assert bool(annealed) is searched
    if not searched:
        assert best.figures.step_s == pytest.approx(32.0)


def test_sizes_outside_the_profile_are_left_out(propose):
    """Not an error while another proposal can be priced."""
    cost, graph = two_stages(8)
    measured = replace(cost.profile, proportional=False)
    twos = with_size(graph, 2)
    propose(twos, graph)
    best = plan(measured, cost.cluster, 8, planner="test")
    assert best.stage_graph.stages[0].microbatch_size == 1
    propose(twos)
    with pytest.raises(InfeasiblePlanError, match=r"can be priced: .*says nothing about 2 samples"):
        plan(measured, cost.cluster, 8, planner="test")


def test_proportional_profiles_are_noted(propose):
    """Every figure rests on it; it is said once, where the costs come from."""
    cost, graph = two_stages(4)
    propose(graph)
    assert found(cost, 4).notes == ()
    assert "proportional" in found(cost, 4).profile


def test_the_limit_on_replicas_reaches_the_planner(propose):
    """Where it has such a field; elsewhere a note says that it was ignored."""
    cost = cost_model((), [1, 1], [1, 1], cluster(4))
    propose(planner=Limited)
    assert found(cost, 4).stage_graph.stages[0].replicas == 4
    assert found(cost, 4, max_replicas=2).stage_graph.stages[0].replicas == 2
    propose(stage_graph((), [(0, 1), (2, 3)], 4, [4, 4]))
    assert any(
        "--max-replicas 2 is ignored" in note for note in found(cost, 4, max_replicas=2).notes
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "nobody"}, "unknown planner 'nobody'; there are test"),
        (
            {"schedule": "2f2b"},
            "unknown schedule '2f2b'; there are 1f1b, 1f1b-deep, gpipe, 1f1b-split",
        ),
        ({"batch_size": 0}, "batch size is 0"),
        ({"microbatch_size": 0}, "micro-batch size is 0"),
        ({"microbatch_size": 9}, "micro-batch size 9 is larger than the batch size 8"),
        ({"max_replicas": 0}, "number of replicas is 0"),
    ],
)
def test_wrong_arguments(propose, options, message):
    """Before anything is searched."""
    cost, graph = two_stages(8)
    propose(graph)
    arguments = {"batch_size": 8, "planner": "test"} | options
    with pytest.raises(ValueError, match=message):
        plan(cost.profile, cost.cluster, arguments.pop("batch_size"), **arguments)


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
    cost, graph = two_stages(8)
    propose(planner=lambda: Interrupted((with_size(graph, 2), graph)))
    best = found(cost, 8)
    assert best.stage_graph.stages[0].microbatch_size == 1
    assert best.notes[-1] == "interrupted: the best of the first 2 proposals"
    assert best.interrupted
    propose(planner=lambda: Interrupted(()))
    with pytest.raises(KeyboardInterrupt):
        found(cost, 8)


def test_published_is_the_schedule_of_the_planner(propose):
    """And no other."""
    cost, graph = two_stages(8)
    propose(planner=lambda: Published(graph))
    assert found(cost, 8, schedule="published").schedule == "gpipe"
    assert found(cost, 8).schedule == "1f1b"


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
    cost, graph = two_stages(8)

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
    cost, graph = two_stages(8)
    propose(planner=lambda: Interrupted(()))
    planners.PLANNERS["some"] = lambda: Interrupted((graph,))
    planners.PLANNERS["quick"] = lambda: Proposals((graph,))
    rows = dict(compare(cost.profile, cost.cluster, 8))
    assert isinstance(rows["test"], SearchStoppedError)
    assert rows["some"].notes[-1] == "interrupted: the best of the first 1 proposals"
    assert rows["some"].interrupted
    assert not rows["quick"].interrupted


def test_compare_refuses_before_it_searches(propose):
    """A mistake in the options of the last planner does not cost the search of the first."""
    cost, graph = two_stages(8)
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
    cost, graph = two_stages(8)
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
    assert best.interrupted


@pytest.mark.parametrize(("where", "name"), [(step_search, "require"), (simulation, "run")])
def test_an_interrupt_at_the_last_moment_keeps_the_plan(propose, monkeypatch, where, name):
    """The search is over, the winner checked and simulated once more: one interrupt is too late to
    count.
    """
    cost, graph = two_stages(8)
    propose(graph)
    whole, times = getattr(where, name), []

    def once(*arguments, **options):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(where, name, once)
    best = found(cost, 8)
    assert best.predicted.step_s == pytest.approx((8 + 1) * 2)
    assert best.notes[-1] == "interrupted when the search was over"
    assert best.interrupted


def test_an_interrupt_while_shared_state_is_tried_is_noted(propose, monkeypatch):
    """The last part of a search, which went on as if nobody had pressed Ctrl-C."""
    cost, graph = two_stages(8)
    propose(graph)
    whole = Judge.consider

    def consider(self, *args, **options):
        if self._objective.cost.shard_optimizer:
            raise KeyboardInterrupt
        return whole(self, *args, **options)

    monkeypatch.setattr(Judge, "consider", consider)
    assert found(cost, 8).notes[-1] == "interrupted: the best of the first 1 proposals"


def test_an_interrupt_before_shared_state_is_tried_is_noted(propose, monkeypatch):
    """While it is asked which proposals may become shorter by it."""
    cost, graph = two_stages(8)
    propose(graph)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(contest, "_is_replicated", interrupt)
    best = found(cost, 8)
    assert best.notes[-1] == "interrupted: the best of the first 1 proposals"
    assert best.interrupted


def test_the_collector_looks_at_what_a_search_makes_only(propose, monkeypatch):
    """Objects made before are frozen meanwhile, and stay so if the caller froze them."""
    monkeypatch.setattr("anabranch.solve.search.gc", gc)
    cost, graph = two_stages(8)
    frozen = list[int]()

    def planner() -> Proposals:
        frozen.append(gc.get_freeze_count())
        return Proposals((graph,))

    propose(planner=planner)
    gc.unfreeze()
    found(cost, 8)
    assert frozen[-1] > 0 == gc.get_freeze_count()
    gc.freeze()
    found(cost, 8)
    assert gc.get_freeze_count() > 0
