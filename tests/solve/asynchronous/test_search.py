"""Asynchronous plans: what is chosen, with which memory, what is refused and said."""

from dataclasses import dataclass, field, replace

import pytest

from anabranch import planner as planners
from anabranch import solve
from anabranch.cost import CostModel
from anabranch.errors import InfeasiblePlanError, PolicyError
from anabranch.plans.edges import edge_values
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.schedule.asynchronous import split_batches
from anabranch.simulator.staleness import staleness
from anabranch.solve.asynchronous.search import microbatch_sizes
from anabranch.solve.asynchronous.version_demands import STREAM
from anabranch.weights import OPTIMIZERS, POLICIES, OptimizerFacts, policy_named
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import asynchronous, on_chain

BRANCHES = ((0, 2), (1, 2))


@dataclass(frozen=True)
class Proposals:
    """A planner that proposes the same stages for whatever it is asked, and counts."""

    graphs: tuple[StageGraph, ...]
    asked: list[tuple[int, int | None]] = field(compare=False)

    def __call__(self, cost: CostModel, *, batch_size: int, microbatch_size: int | None = None):
        self.asked.append((batch_size, microbatch_size))
        return [
            replace(
                graph,
                batch_size=batch_size,
                stages=tuple(
                    replace(stage, microbatch_size=microbatch_size) for stage in graph.stages
                ),
            )
            for graph in self.graphs
        ]


@pytest.fixture
def propose(monkeypatch):
    """Register proposals under the name ``test``; what was asked is returned."""

    def register(*graphs: StageGraph) -> list[tuple[int, int | None]]:
        asked: list[tuple[int, int | None]] = []
        table = {"test": lambda: Proposals(graphs, asked)}
        monkeypatch.setattr(planners, "PLANNERS", table, raising=False)
        return asked

    return register


@pytest.mark.parametrize("planner", ["graphpipe", "pipedream", "sequential", "dapple", "piper"])
def test_every_planner_finds_equal_stages(planner):
    """Four operators on four devices: one each, a sample, which no replicas share, every 3 s."""
    plan = asynchronous(on_chain(), 1, planner=planner, policy="stash")
    assert plan.predicted.step_s == pytest.approx(3.0)
    assert plan.predicted.bubble == pytest.approx(0.0, abs=1e-9)
    assert [stage.in_flight for stage in plan.stage_graph.stages] == [4, 3, 2, 1]
    assert (plan.mode, plan.policy, plan.schedule) == ("async", "stash", "1f1b")
    assert solve.check_plan(plan) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_has_a_plan_that_is_valid(policy):
    """Also with the model: conditions C1 to C4, memory, and the order without a flush."""
    cost = on_chain()
    plan = asynchronous(cost, 8, policy=policy)
    assert plan.policy == policy
    assert solve.check_plan(plan, cost.profile, cost.cluster) == []
    many = plan.stage_graph.num_microbatches(0)
    assert many >= plan.stage_graph.depth if policy.startswith("2bw") else many == 1


def test_branches_run_side_by_side():
    """Two branches and what joins them: depth 2, with the period of a chain."""
    cost = cost_model(BRANCHES, [1.0] * 3, [2.0] * 3, cluster(3), value_bytes=4)
    plan = asynchronous(cost, 1, policy="stash")
    assert plan.stage_graph.depth == 2
    assert plan.predicted.step_s == pytest.approx(3.0)


def test_of_equal_periods_the_shallower_wins(propose):
    """The same stages in a row and side by side take equally long; the row is more stale."""
    cost = cost_model(BRANCHES, [1.0] * 3, [2.0] * 3, cluster(3))
    beside = stage_graph(BRANCHES, [(0,), (1,), (2,)], 1)
    in_a_row = replace(beside, edges=((0, 1), (0, 2), (1, 2)))
    for graphs in ((beside, in_a_row), (in_a_row, beside)):
        propose(*graphs)
        plan = asynchronous(cost, 1, planner="test", policy="stash")
        assert plan.stage_graph.edges == BRANCHES


def test_stages_that_need_not_wait_for_one_another_do_not():
    """Three branches before a join; the best proposal is a row, in which one waits for another."""
    edges = ((0, 6), (1, 6), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7))
    seconds = [6.0, 1.0, 3.0, 6.0, 6.0, 3.0, 1.0, 6.0]
    cost = cost_model(edges, seconds, [2 * s for s in seconds], cluster(6))
    plan = asynchronous(cost, 1, policy="stash")
    assert plan.predicted.step_s == pytest.approx(18.0)
    assert set(plan.stage_graph.edges) == set(edge_values(plan.stage_graph, cost.graph))
    assert plan.stage_graph.depth == 5


def test_of_equal_depths_the_one_with_less_memory_wins(propose):
    """The stage with many weights holds fewer versions where it comes last."""
    cost = on_chain(2)
    whole = stage_graph(chain(2), [(0,), (1,)], 1)
    again = replace(whole, stages=tuple(replace(s, recompute=True) for s in whole.stages))
    propose(again, whole)
    plan = asynchronous(cost, 1, planner="test", policy="naive")
    assert not any(stage.recompute for stage in plan.stage_graph.stages)


def test_the_planner_is_asked_for_a_row_of_mini_batches(propose):
    """With the all-reduce of every one, and micro-batches of whole mini-batches."""
    asked = propose(stage_graph(chain(2), [(0,), (1,)], 1))
    asynchronous(on_chain(2), 4, planner="test", policy="pipeoptim")
    assert asked == [(4 * STREAM, 4)]


def test_memory_counts_every_version():
    """Stage 0 of 4 under stash: 100 * (4 versions + gradient + 2 of optimizer) bytes, and 100 of a
    gradient before it is added.
    """
    cost = on_chain()
    peaks = asynchronous(cost, 1, policy="stash").predicted.device_peak_bytes
    assert peaks == (800, 700, 600, 500)
    assert asynchronous(cost, 1, policy="naive").predicted.device_peak_bytes == (500,) * 4
    two = asynchronous(cost, 1, policy="pipeoptim").predicted.device_peak_bytes
    assert two == (600, 600, 600, 500)


@pytest.mark.parametrize("planner", ["graphpipe", "pipedream", "sequential", "piper"])
def test_versions_that_do_not_fit_shift_the_cuts(planner):
    """Eight operators on four devices, 100 bytes of weights each, in 1350 bytes.

    In equal parts stage 0 holds 200 * (4 + 3) + 100 = 1500 under stash; with 1, 2, 2 and 3
    operators the stages hold 800, 1300, 1100 and 1300.
    """
    cost = cost_model(
        chain(8), [1.0] * 8, [2.0] * 8, cluster(4, memory_bytes=1350), parameter_bytes=100
    )
    equal = asynchronous(cost, 1, planner=planner, policy="pipeoptim")
    assert equal.predicted.step_s == pytest.approx(6.0)
    plan = asynchronous(cost, 1, planner=planner, policy="stash")
    assert plan.predicted.step_s == pytest.approx(9.0)
    assert max(plan.predicted.device_peak_bytes) <= 1350


def test_what_does_not_fit_at_all_is_said():
    """No plan: the policy, the least that would do, and a way on."""
    said = r"policy stash.*0\.8 KiB.*0\.5 KiB.*2bw, pipeoptim"
    with pytest.raises(InfeasiblePlanError, match=said):
        asynchronous(on_chain(memory_bytes=550), 4, policy="stash", max_replicas=1)


def test_auto_says_why():
    """The recommended policy is in the plan and its reason in the notes."""
    plan = asynchronous(on_chain(), 2)
    assert plan.policy in POLICIES
    assert any(note.startswith(f"policy {plan.policy}: ") for note in plan.notes)


def test_compare_asks_a_planner_once(propose):
    """All policies with one micro-batch per mini-batch take the same proposals."""
    asked = propose(stage_graph(chain(2), [(0,), (1,)], 1))
    cost = on_chain(2)
    names = [name for name in POLICIES if not POLICIES[name]().microbatches]
    rows = list(solve.compare_policies(cost.profile, cost.cluster, 4, ["test"], names))
    assert [(planner, policy) for planner, policy, _ in rows] == [("test", n) for n in names]
    assert len(asked) == 1


def test_compare_has_an_error_per_policy():
    """A micro-batch size that suits 2bw alone is an error of the others, not of the comparison."""
    cost = on_chain()
    rows = solve.compare_policies(
        cost.profile, cost.cluster, 8, ["graphpipe"], ["stash", "2bw"], microbatch_size=2
    )
    found = {policy: outcome for _, policy, outcome in rows}
    assert isinstance(found["stash"], PolicyError)
    assert "every mini-batch is one micro-batch" in str(found["stash"])
    assert isinstance(found["2bw"], Plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "asynchronous"}, r"unknown mode 'asynchronous'; there are sync and async"),
        ({"mode": "sync", "policy": "stash"}, r"policy stash is for mode async"),
        ({"mode": "async", "schedule": "gpipe"}, r"schedule gpipe is for mode sync"),
        ({"mode": "async", "policy": "stash", "microbatch_size": 2}, r"leave the size out"),
        ({"mode": "async", "policy": "2bw", "microbatch_size": 3}, r"do not divide"),
    ],
)
def test_wrong_words_are_refused(options, message):
    """Before anything is searched."""
    cost = on_chain(2)
    with pytest.raises(ValueError, match=message):
        solve.plan(cost.profile, cost.cluster, 4, **options)


def test_an_unknown_policy_is_a_policy_error():
    """As it is where one trains."""
    cost = on_chain(2)
    with pytest.raises(PolicyError, match=r"unknown policy 'hoard'.*stash"):
        solve.plan(cost.profile, cost.cluster, 4, mode="async", policy="hoard")


def test_tied_parameters_are_kept_together():
    """No plan has the two operators that read one parameter in two stages."""
    cost = cost_model(chain(3), [1.0] * 3, [2.0] * 3, cluster(2), parameter_bytes=100, tied=(1, 2))
    plan = asynchronous(cost, 2, policy="stash", max_replicas=1)
    assert plan.stage_graph.stages[-1].operators == ("op1", "op2")


def test_recomputation_on_other_weights_is_said(propose):
    """Under a policy whose backward reads current weights; stash is exact."""
    graph = stage_graph(chain(2), [(0,), (1,)], 1)
    propose(replace(graph, stages=tuple(replace(s, recompute=True) for s in graph.stages)))
    cost = on_chain(2)
    notes = asynchronous(cost, 1, planner="test", policy="pipeoptim").notes
    # A run under another policy leaves out what opens so.
    said = "policy pipeoptim: stages 0, 1 recompute"
    assert any(note.startswith(said) and "later weights" in note for note in notes)
    exact = asynchronous(cost, 1, planner="test", policy="stash").notes
    assert not any("recompute" in note for note in exact)


def test_auto_goes_by_the_optimizer():
    """Without momentum there is nothing to predict with; its name is in the reason."""
    cost = on_chain()
    plain = asynchronous(cost, 8, max_replicas=1, optimizer=OPTIMIZERS["sgd"])
    assert plain.policy == "2bw"
    assert any("SGD has no momentum" in note for note in plain.notes)
    moving = asynchronous(cost, 7, max_replicas=1, optimizer=OPTIMIZERS["adamw"])
    assert moving.policy == "pipeoptim"
    assert any("AdamW's own rule" in note for note in moving.notes)
    cut = asynchronous(cost, 8, max_replicas=1, optimizer=OPTIMIZERS["adamw"])
    assert cut.policy == "2bw-ef"
    assert any("which error feedback makes up for" in note for note in cut.notes)


def test_the_reason_of_auto_is_true_of_the_plan():
    """How many micro-batches there are, how deep it is, and how many copies are held."""
    cost = on_chain()
    plain = asynchronous(cost, 16, max_replicas=1, optimizer=OPTIMIZERS["sgd"])
    (why,) = (note for note in plain.notes if "SGD has no momentum" in note)
    assert "a batch of 16 can be cut into micro-batches" in why
    kept = asynchronous(cost, 7, max_replicas=1, optimizer=OptimizerFacts("RMSprop"))
    (why,) = (note for note in kept.notes if note.startswith("policy pipeoptim"))
    assert "the last update of RMSprop, which is kept," in why
    assert f"at depth {kept.stage_graph.depth}" in why
    held = staleness(split_batches(kept.stage_graph), policy_named("pipeoptim"), last_update=True)
    assert f"at most {max(stage.versions for stage in held)} copies" in why


def test_an_optimizer_may_be_named():
    """As on the command line; refused where the policy is for another one, or nobody knows it."""
    with pytest.raises(PolicyError, match=r"asyncpp is stashing under NAdam, .* is AdamW"):
        asynchronous(on_chain(), 4, policy="asyncpp", optimizer="adamw")
    assert asynchronous(on_chain(), 4, policy="asyncpp", optimizer="nadam").policy == "asyncpp"
    with pytest.raises(ValueError, match=r"unknown optimizer 'lion'; name one of sgd, .*nadam"):
        asynchronous(on_chain(), 4, policy="asyncpp", optimizer="lion")


def test_auto_leaves_room_for_the_last_update():
    """Two copies fit, not the third that a prediction takes here."""
    cost = on_chain(memory_bytes=650)
    options = {"max_replicas": 1, "planner_options": {"recompute": False}}
    known = asynchronous(cost, 1, optimizer=OPTIMIZERS["adamw"], **options)
    assert known.policy == "pipeoptim"
    assert asynchronous(cost, 1, optimizer=OPTIMIZERS["other"], **options).policy == "naive"


def test_a_prediction_without_momentum_is_said():
    """In the notes of the plan."""
    notes = asynchronous(on_chain(), 1, policy="pipeoptim", optimizer=OPTIMIZERS["sgd"]).notes
    assert any("every prediction is the current weights" in note for note in notes)


def test_sizes_to_choose_from():
    """The whole mini-batch; for 2bw whole fractions of it, about four per device at most."""
    assert microbatch_sizes(24, policy_named("stash"), 4) == [24]
    assert microbatch_sizes(24, policy_named("2bw"), 4) == [24, 12, 6, 3, 1]
    assert microbatch_sizes(30, policy_named("2bw"), 2) == [30, 15, 6, 3]
    assert microbatch_sizes(64, policy_named("2bw"), 2) == [64, 32, 16, 8]


def three_devices() -> CostModel:
    """A stage of 24 s a mini-batch before one of 12 s; 2 s for a sum over two devices."""
    machines = cluster(3, bandwidth=50.0)
    return cost_model(chain(2), [2.0, 1.0], [4.0, 2.0], machines, parameter_bytes=100)


@pytest.mark.parametrize("planner", ["auto", "pipedream"])
def test_replicas_take_turns_where_that_is_quicker(planner):
    """One sum for two mini-batches: 13 s in place of 14."""
    cost = three_devices()
    best = asynchronous(cost, 4, planner=planner, policy="stash", optimizer_factor=0.0)
    assert best.round_robin
    assert best.predicted.step_s == pytest.approx(13.0)
    assert [stage.devices for stage in best.stage_graph.stages] == [(0, 1), (2,)]
    assert "replicas of a stage take mini-batches in turn" in best.summary()
    assert "one update for each in stage 1, for 2 in stage 0" in best.summary()
    again = solve.simulate_async(best, cost.profile, cost.cluster, optimizer_factor=0.0)
    assert again.steady.period_s == best.predicted.step_s
    assert again.plan.round_robin
    assert again.steady.device_peak_bytes == best.predicted.device_peak_bytes
    assert [age.versions for age in again.staleness] == [2, 1]
    assert solve.check_plan(best, cost.profile, cost.cluster) == []


@pytest.mark.parametrize(
    ("bandwidth", "in_turns", "seconds"),
    [(50.0, False, 22.0), (10.0, False, 38.0), (5.0, True, 38.0)],
)
def test_a_whole_model_in_turns_has_to_gain_what_its_updates_cost(bandwidth, in_turns, seconds):
    """Two copies of the model in turns make half of the updates. They would take 20 s in place of
    22, and 28 in place of 38; 38 in place of 58 is less than 58 divided by the square root of two.
    """
    cost = cost_model(chain(1), [3.0], [6.0], cluster(2, bandwidth=bandwidth), parameter_bytes=200)
    best = asynchronous(cost, 4, policy="stash", optimizer_factor=0.0)
    assert best.round_robin == in_turns
    assert best.predicted.step_s == pytest.approx(seconds)
    assert in_turns == ("each of them whole: one update for 2 in stage 0" in best.summary())


@pytest.mark.parametrize("policy", ["vertical-sync", "2bw"])
def test_policies_without_turns(policy):
    """Stages without a common version, and updates of the micro-batches of one mini-batch."""
    best = asynchronous(three_devices(), 4, policy=policy, optimizer_factor=0.0)
    assert not best.round_robin
    assert max(stage.replicas for stage in best.stage_graph.stages) == 2


def test_a_mini_batch_is_split_where_whole_ones_do_not_fit():
    """A replica with two mini-batches of 4 samples in flight holds 800 bytes, with halves 400."""
    cost = cost_model(
        chain(2), [2.0, 1.0], [4.0, 2.0], cluster(3, bandwidth=50.0, memory_bytes=900),
        parameter_bytes=100, kept_bytes=100,
    )  # fmt: skip
    best = asynchronous(cost, 4, policy="stash", optimizer_factor=0.0)
    assert not best.round_robin
    assert best.predicted.step_s == pytest.approx(14.0)


def test_pipedream_takes_turns_as_published():
    """Where a sum costs nothing both are as quick, and other planners split."""
    cost = cost_model(chain(2), [2.0, 1.0], [4.0, 2.0], cluster(3))
    plans = [asynchronous(cost, 4, planner=p, policy="stash") for p in ("auto", "pipedream")]
    assert [plan.round_robin for plan in plans] == [False, True]
    assert plans[0].predicted.step_s == pytest.approx(plans[1].predicted.step_s)


def test_what_compares_samples_takes_no_turns():
    """Where replicas of the first stage would, if the second did not need the whole mini-batch."""
    cost = three_devices()
    model = cost.profile.graph
    across = replace(model, ops=(model.ops[0], replace(model.ops[1], whole_batch=True)))
    cost = replace(cost, profile=replace(cost.profile, graph=across))
    best = asynchronous(cost, 4, policy="stash", optimizer_factor=0.0)
    assert not best.round_robin
    assert solve.check_plan(best, cost.profile, cost.cluster) == []


def test_what_compares_samples_is_not_cut_into_micro_batches():
    """Policy auto takes one of whole mini-batches; one that cuts them is refused."""
    cost = on_chain()
    model = cost.profile.graph
    across = replace(model, ops=(*model.ops[:-1], replace(model.ops[-1], whole_batch=True)))
    cost = replace(cost, profile=replace(cost.profile, graph=across))
    best = asynchronous(cost, 16, max_replicas=1, optimizer=OPTIMIZERS["adamw"])
    assert best.policy == "pipeoptim"
    with pytest.raises(InfeasiblePlanError, match=r"2bw-ef cuts .* needs all samples of a batch"):
        asynchronous(cost, 16, policy="2bw-ef")


def test_a_row_has_no_more_micro_batches_than_a_stage_may_have(propose):
    """64 micro-batches of one sample: 128 mini-batches in a row in place of 256."""
    asked = propose(stage_graph(chain(4), [(s,) for s in range(4)], 1, [1] * 4))
    best = asynchronous(on_chain(), 64, planner="test", policy="2bw", microbatch_size=1)
    assert asked == [(128 * 64, 1)]
    assert best.stage_graph.batch_size == 64


def test_a_simulation_of_another_policy_splits(propose):
    """Of a plan whose replicas take turns."""
    cost = three_devices()
    best = asynchronous(cost, 4, policy="stash", optimizer_factor=0.0, planner="auto")
    other = solve.simulate_async(best, cost.profile, cost.cluster, policy="vertical-sync")
    assert not other.plan.round_robin
    assert other.steady.period_s == pytest.approx(14.0)
    assert not solve.synchronous(best).round_robin
