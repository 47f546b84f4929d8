"""Plans simulated, with a flush and without: figures, timelines, and what is wrong with them."""

from dataclasses import replace

import pytest

from anabranch import solve
from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.graph.opgraph import Op, OpGraph, Value
from anabranch.plans.plan import CHANGED, Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.schedule import SCHEDULES
from anabranch.solve import check_plan, ideal_step_s, simulate
from anabranch.weights import OPTIMIZERS
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import a_plan, asynchronous, on_chain, two_stages


def test_simulating_another_schedule_uses_its_own_counts():
    """GPipe holds all 8 micro-batches, whatever the plan was made for."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2), kept_bytes=100)
    graph = stage_graph(chain(2), [(0,), (1,)], 8)
    timeline = simulate(a_plan(graph), cost.profile, cost.cluster, schedule="gpipe")
    assert timeline.peak_bytes == {0: 800, 1: 800}
    assert simulate(a_plan(graph), cost.profile, cost.cluster).peak_bytes == {0: 200, 1: 100}


def test_simulating_auto_is_the_faster_one():
    """As plan would choose for this stage graph."""
    cost, graph = two_stages(8, bandwidth=8)
    deep = simulate(a_plan(graph), cost.profile, cost.cluster, schedule="1f1b-deep")
    assert simulate(a_plan(graph), cost.profile, cost.cluster, schedule="auto") == deep


def test_simulating_an_invalid_plan():
    """Every problem is in the message."""
    cost, graph = two_stages(8)
    other = replace(graph, stages=(replace(graph.stages[0], operators=("opX",)), graph.stages[1]))
    with pytest.raises(InvalidPlanError, match=r"opX.*op0"):
        simulate(a_plan(other), cost.profile, cost.cluster)


@pytest.mark.parametrize("schedule", [None, "auto", "gpipe"])
def test_simulating_millions_of_microbatches(schedule):
    """2^24 of them: a sentence at once, not lists of them."""
    cost, graph = two_stages(8)
    stages = tuple(replace(stage, microbatch_size=1) for stage in graph.stages)
    huge = a_plan(replace(graph, stages=stages, batch_size=2**24))
    with pytest.raises(InvalidPlanError, match="16777216 micro-batches of 1 samples"):
        simulate(huge, cost.profile, cost.cluster, schedule=schedule)
    assert len(check_plan(huge)) == len(check_plan(huge, cost.profile, cost.cluster)) == 2


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
    large = tuple(replace(stage, microbatch_size=9) for stage in graph.stages)
    assert (
        "micro-batches of 9 samples, the batch only 8"
        in check_plan(a_plan(replace(graph, stages=large)))[0]
    )


def test_check_plan_with_a_model():
    """C1-C4 and memory; one of profile and cluster alone is a mistake."""
    cost, graph = two_stages(8)
    assert check_plan(a_plan(graph), cost.profile, cost.cluster) == []
    problems = check_plan(a_plan(graph), cost.profile, cluster(2, memory_bytes=1))
    assert len(problems) == 2
    assert "needs 8 B on each device" in problems[0]
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


def test_a_simulated_plan_is_the_plan():
    """The figures of a plan are those of its simulation; the timeline goes from empty to empty."""
    cost = on_chain()
    plan = asynchronous(cost, 2, policy="stash", max_replicas=1)
    found = solve.simulate_async(plan, cost.profile, cost.cluster)
    assert found.plan.predicted == plan.predicted
    assert [stage.versions for stage in found.staleness] == [4, 3, 2, 1]
    batches = found.graph.batch_size // 2
    assert found.timeline.step_s == pytest.approx(6.0 * (batches + 3))
    assert solve.simulate(plan, cost.profile, cost.cluster) == found.timeline


def test_a_plan_changed_by_hand_is_predicted_anew():
    """So its note that nothing is predicted goes, and others stay; without a flush likewise."""
    cost, graph = two_stages(2)
    changed = replace(a_plan(graph), notes=("mine", CHANGED), predicted=None)
    found = [
        solve.foreseen(changed, cost.profile, cost.cluster)[0],
        solve.simulate_async(changed, cost.profile, cost.cluster).plan,
    ]
    for plan in found:
        assert plan.figures.step_s > 0
        assert plan.notes == ("mine",)


def test_a_synchronous_plan_is_simulated_without_its_flush():
    """4 micro-batches of 1 sample: 2bw keeps them, other policies take the batch as a whole."""
    cost = on_chain()
    plan = solve.plan(cost.profile, cost.cluster, 4, microbatch_size=1, max_replicas=1)
    for policy, count in (("2bw", 4), ("stash", 1)):
        found = solve.simulate_async(plan, cost.profile, cost.cluster, policy=policy)
        assert found.plan.stage_graph.num_microbatches(0) == count
        assert found.steady.period_s == pytest.approx(12.0)
        assert found.steady.period_s < plan.predicted.step_s


def test_a_plan_and_its_synchronous_twin():
    """The same stages with a flush: one micro-batch at a time through four stages."""
    cost = on_chain()
    plan = asynchronous(cost, 2, policy="stash", max_replicas=1)
    twin = solve.synchronous(plan)
    assert (twin.mode, twin.policy) == ("sync", "")
    assert solve.check_plan(twin, cost.profile, cost.cluster) == []
    assert solve.simulate(twin, cost.profile, cost.cluster).step_s == pytest.approx(4 * 6.0)
    assert solve.synchronous(twin) is twin


def test_a_simulation_beyond_memory_is_refused():
    """A plan for one policy under another that holds more, with the versions in the message."""
    cost = on_chain(memory_bytes=650)
    plan = asynchronous(cost, 4, policy="pipeoptim", max_replicas=1)
    with pytest.raises(InvalidPlanError, match=r"stage 0 needs .* 4 versions of its weights"):
        solve.simulate_async(plan, cost.profile, cost.cluster, policy="stash")


def test_check_finds_what_is_wrong():
    """Too few micro-batches for the policy, tied parameters, memory: one line each."""
    cost = on_chain()
    plan = asynchronous(cost, 4, policy="stash", max_replicas=1)
    (problem,) = solve.check_plan(replace(plan, policy="2bw"))
    assert "1 < 4" in problem
    tied = cost_model(chain(4), [1.0] * 4, [2.0] * 4, cluster(4), parameter_bytes=100, tied=(0, 3))
    (problem,) = solve.check_plan(plan, tied.profile, tied.cluster)
    assert "stages 0 and 3 share parameters; without a flush" in problem
    empty = cost_model(chain(4), [1.0] * 4, [2.0] * 4, cluster(4), tied=(0, 3))  # of no bytes
    (problem,) = solve.check_plan(plan, empty.profile, empty.cluster)
    assert "stages 0 and 3 share parameters; without a flush" in problem
    small = on_chain(memory_bytes=750)
    (problem,) = solve.check_plan(plan, small.profile, small.cluster)
    assert "4 versions of its weights" in problem


def test_the_optimizer_counts_in_a_simulation_and_a_check():
    """One more copy where it has no rule, and no policy that it cannot serve."""
    cost = on_chain(memory_bytes=650)
    plan = asynchronous(cost, 4, policy="pipeoptim", max_replicas=1)
    arguments = plan, cost.profile, cost.cluster
    assert solve.check_plan(*arguments, optimizer=OPTIMIZERS["adamw"]) == []
    (first, *_) = solve.check_plan(*arguments, optimizer=OPTIMIZERS["other"])
    assert "3 versions of its weights" in first
    with pytest.raises(InvalidPlanError, match="3 versions of its weights"):
        solve.simulate_async(*arguments, optimizer=OPTIMIZERS["other"])
    with pytest.raises(PolicyError, match="the optimizer is Adam"):
        solve.simulate_async(*arguments, policy="spectrain", optimizer=OPTIMIZERS["adam"])
    (problem,) = solve.check_plan(replace(plan, policy="spectrain"), optimizer=OPTIMIZERS["sgd"])
    assert "SGD without momentum" in problem


def test_auto_without_momentum_for_a_plan_in_one_piece():
    """Its mini-batches are not cut, so the policy is not the one that cuts them."""
    cost = on_chain()
    plan = asynchronous(cost, 8, policy="stash", max_replicas=1)
    found = solve.simulate_async(
        plan, cost.profile, cost.cluster, policy="auto", optimizer=OPTIMIZERS["sgd"]
    )
    assert found.plan.policy == "stash"


def test_auto_for_a_plan_of_another_model():
    """The operators that do not exist are named."""
    plan = asynchronous(on_chain(), 4, policy="stash", max_replicas=1)
    other = on_chain(3)
    with pytest.raises(InvalidPlanError, match="the model has no operators op3"):
        solve.simulate_async(plan, other.profile, other.cluster, policy="auto")


def _first(plan: Plan, **changes: object) -> Plan:
    """With a change to the first stage."""
    first, *others = plan.stage_graph.stages
    stages = (replace(first, **changes), *others)
    return replace(plan, stage_graph=replace(plan.stage_graph, stages=stages))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: _first(p, k=2, in_flight=0), InvalidPlanError, "make k 1 in the plan"),
        (lambda p: _first(p, microbatch_size=2), InvalidPlanError, "give all stages one microbatc"),
        (lambda p: replace(p, schedule="gpipe"), InvalidPlanError, "schedule gpipe is for mode sy"),
        (lambda p: replace(p, policy="2bw"), PolicyError, "1 < 4; choose 4 or more"),
        (lambda p: replace(p, policy="hoard"), PolicyError, "unknown policy 'hoard'"),
    ],
)
def test_what_check_refuses_is_not_simulated(change, error, message):
    """In the same words."""
    cost = on_chain()
    plan = change(asynchronous(cost, 4, policy="stash", max_replicas=1))
    with pytest.raises(error, match=message) as refused:
        solve.simulate_async(plan, cost.profile, cost.cluster)
    assert solve.check_plan(plan) == [str(refused.value)]


def test_a_device_with_several_stages_needs_the_flush():
    """Said with the way on, also of a synchronous plan; check says so of an asynchronous one."""
    cost = on_chain()
    plan = asynchronous(cost, 4, policy="stash", max_replicas=1)
    plan = _first(plan, devices=plan.stage_graph.stages[1].devices)
    says = r"device 1 has stages 0 and 1; without a flush .* --planner-option several=false"
    for chosen in (plan, replace(plan, mode="sync", policy="", schedule="1f1b")):
        with pytest.raises(InvalidPlanError, match=says) as refused:
            solve.simulate_async(chosen, cost.profile, cost.cluster, policy="stash")
        assert "C3" not in str(refused.value)
    assert solve.check_plan(plan, cost.profile, cost.cluster) == [str(refused.value)]


def test_a_plan_in_pieces_is_simulated_whole_only_where_that_is_asked():
    """stash by the plan itself is refused, as by ``check``; another one gets new pieces."""
    cost = on_chain()
    plan = asynchronous(cost, 4, policy="2bw", microbatch_size=1, max_replicas=1)
    found = solve.simulate_async(plan, cost.profile, cost.cluster, policy="stash")
    assert found.plan.stage_graph.num_microbatches(0) == 1
    with pytest.raises(PolicyError, match="4 micro-batches per mini-batch"):
        solve.simulate_async(replace(plan, policy="stash"), cost.profile, cost.cluster)
