"""What every pass reads under every policy, against the schedule itself and by eye."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PolicyError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import SCHEDULES
from anabranch.schedule.schedule import Kind
from anabranch.weights import (
    POLICIES,
    PredictStash,
    SpecTrain,
    Unit,
    VerticalSync,
    WeightPolicy,
    policy_named,
)
from tests.weights.drawing import draw

CHAIN = ((0, 1), (1, 2), (2, 3))
TWO_BRANCHES = ((0, 1), (0, 3), (1, 2), (2, 4), (3, 4))
"""A stem, a branch of two stages, a branch of one, and where they meet."""


def graph_of(edges: tuple[tuple[int, int], ...], units: int, rule: str = "1f1b") -> StageGraph:
    """Stages with their in-flight counts for so many mini-batches of one sample."""
    count = 1 + max(y for _, y in edges)
    stages = tuple(Stage((f"op{s}",), (s,), 1) for s in range(count))
    return SCHEDULES[rule]().warm_up(StageGraph(stages, edges, units))


def at_passes(graph: StageGraph, rule: str) -> dict[tuple[int, Kind, int], int]:
    """(stage, kind, unit) -> updates that the stage has made by then: backwards before it in the
    stage's own list of actions, each of which ends in an update.
    """
    found = {}
    for actions in SCHEDULES[rule]().order(graph).actions.values():
        updates = 0
        for action in actions:
            found[action.stage, action.kind, action.microbatch] = updates
            updates += action.kind is Kind.BACKWARD
    return found


def unit_of(graph: StageGraph, s: int, n: int, filled: int = 0) -> Unit:
    held = [stage.in_flight for stage in graph.stages]
    return Unit(n, filled, held[s], max(held))


@pytest.mark.parametrize("rule", ["1f1b", "1f1b-deep"])
@pytest.mark.parametrize("edges", [CHAIN, TWO_BRANCHES])
def test_lags_are_those_of_the_schedule(edges, rule):
    """A unit's lag and the version that it sees follow from where the schedule puts its passes; a
    deeper warm-up is staler than the distance to the sink says.
    """
    graph = graph_of(edges, 12, rule)
    there = at_passes(graph, rule)
    for s in range(len(graph)):
        for n in range(12):
            unit = unit_of(graph, s, n)
            assert unit.seen == there[s, Kind.FORWARD, n]
            assert there[s, Kind.BACKWARD, n] == n
            assert unit.lag == n - there[s, Kind.FORWARD, n]


@pytest.mark.parametrize("edges", [CHAIN, TWO_BRANCHES])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_nothing_is_read_before_it_is_made(name, edges):
    """Versions that a pass reads exist at that point of the schedule, and a prediction begins at
    the newest one.
    """
    policy = POLICIES[name]()
    m = 4 if policy.microbatches else 1
    graph = graph_of(edges, 12 * m)
    there = at_passes(graph, "1f1b")
    for s in range(len(graph)):
        for n in range(12):
            forward = policy.forward(unit_of(graph, s, n))
            backward = policy.backward(unit_of(graph, s, n))
            # Of several micro-batches the first forward sees least.
            then = there[s, Kind.FORWARD, n * m] // m
            assert 0 <= forward.version <= then
            assert 0 <= backward.version <= n
            assert not forward.ahead or forward.version == then
            assert backward == forward or backward.version == n


# Per stage of a chain of four, what forward and backward of mini-batches 0 to 6 read.
READ = {
    "naive": [
        ["0 0 0 0 1 2 3", "0 1 2 3 4 5 6"],
        ["0 0 0 1 2 3 4", "0 1 2 3 4 5 6"],
        ["0 0 1 2 3 4 5", "0 1 2 3 4 5 6"],
        ["0 1 2 3 4 5 6", "0 1 2 3 4 5 6"],
    ],
    "stash": [
        ["0 0 0 0 1 2 3", "0 0 0 0 1 2 3"],
        ["0 0 0 1 2 3 4", "0 0 0 1 2 3 4"],
        ["0 0 1 2 3 4 5", "0 0 1 2 3 4 5"],
        ["0 1 2 3 4 5 6", "0 1 2 3 4 5 6"],
    ],
    "vertical-sync": [["0 0 0 0 1 2 3", "0 0 0 0 1 2 3"]] * 4,
    "2bw": [["0 0 1 2 3 4 5", "0 0 1 2 3 4 5"]] * 4,
    "spectrain": [
        ["0 0+1 0+2 0+3 1+3 2+3 3+3", "0 1 2 3 4 5 6"],
        ["0 0+1 0+2 1+2 2+2 3+2 4+2", "0 1 2 3 4 5 6"],
        ["0+1 0+2 1+2 2+2 3+2 4+2 5+2", "0+1 1+1 2+1 3+1 4+1 5+1 6+1"],
        ["0+1 1+1 2+1 3+1 4+1 5+1 6+1", "0+1 1+1 2+1 3+1 4+1 5+1 6+1"],
    ],
    "pipeoptim": [
        ["0 0+1 0+2 0+3 1+3 2+3 3+3", "0 1 2 3 4 5 6"],
        ["0 0+1 0+2 1+2 2+2 3+2 4+2", "0 1 2 3 4 5 6"],
        ["0 0+1 1+1 2+1 3+1 4+1 5+1", "0 1 2 3 4 5 6"],
        ["0 1 2 3 4 5 6", "0 1 2 3 4 5 6"],
    ],
    "predict-stash": [
        ["0 0+1 0+2 0+3 1+3 2+3 3+3", "0 0+1 0+2 0+3 1+3 2+3 3+3"],
        ["0 0+1 0+2 1+2 2+2 3+2 4+2", "0 0+1 0+2 1+2 2+2 3+2 4+2"],
        ["0 0+1 1+1 2+1 3+1 4+1 5+1", "0 0+1 1+1 2+1 3+1 4+1 5+1"],
        ["0 1 2 3 4 5 6", "0 1 2 3 4 5 6"],
    ],
}
READ |= {"asyncpp": READ["stash"], "basis-rotation": READ["stash"], "2bw-ef": READ["2bw"]}


def rows(policy: WeightPolicy, graph: StageGraph, microbatches: int = 1) -> list[list[str]]:
    """The table that ``draw`` prints, as (forward, backward) per stage."""
    lines = draw(policy, graph, 7, microbatches=microbatches).splitlines()[1:]
    cells = [line.split() for line in lines]
    return [
        [" ".join(f[4:]), " ".join(b[1:])] for f, b in zip(cells[::2], cells[1::2], strict=True)
    ]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_chain_of_four_by_eye(name):
    """The definitions, walked through the schedule from a fill on."""
    policy = POLICIES[name]()
    microbatches = 4 if policy.microbatches else 1
    assert rows(policy, graph_of(CHAIN, 28), microbatches) == READ[name]


def test_a_deep_warm_up_reads_further_back_and_further_ahead():
    """With five, three and one mini-batches in flight a mini-batch is two updates longer under way
    per hop, so SpecTrain's stages look one further ahead per hop; and vertical sync reads the
    version that the first stage has at its forward, four updates ago.
    """
    graph = graph_of(((0, 1), (1, 2)), 20, "1f1b-deep")
    assert rows(SpecTrain(), graph) == [
        ["0 0+1 0+2 0+3 0+4 1+4 2+4", "0 1 2 3 4 5 6"],
        ["0+1 0+2 0+3 1+3 2+3 3+3 4+3", "0+1 1+1 2+1 3+1 4+1 5+1 6+1"],
        ["0+2 1+2 2+2 3+2 4+2 5+2 6+2", "0+2 1+2 2+2 3+2 4+2 5+2 6+2"],
    ]
    assert rows(VerticalSync(), graph) == [["0 0 0 0 0 1 2"] * 2] * 3


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_two_branches_read_like_the_chain_stage_that_is_as_far_from_the_sink(name):
    """Only the longest distance to the sink counts, so the short branch reads like the last stage
    of the long one.
    """
    policy = POLICIES[name]()
    microbatches = 4 if policy.microbatches else 1
    read = rows(policy, graph_of(TWO_BRANCHES, 28), microbatches)
    assert read == [READ[name][s] for s in (0, 1, 2, 2, 3)]


@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 40), st.integers(0, 4), st.integers(0, 20))
def test_after_a_drain_everything_starts_anew(name, n, s, filled):
    """A unit n after a fill at K reads what unit n - K reads after one at 0, K versions later."""
    graph, policy = graph_of(TWO_BRANCHES, 28), POLICIES[name]()
    first, later = unit_of(graph, s, n), unit_of(graph, s, n + filled, filled)
    for read in (policy.forward, policy.backward):
        assert replace(read(first), version=read(first).version + filled) == read(later)


def test_the_rate_of_a_stale_stage_recovers():
    """A lag of four starts at a quarter, is at a half midway in the exponent, and at one after N
    updates; stages with a lag of one or none are not slowed.
    """
    policy = PredictStash(ramp=100)
    assert [policy.rate(4, t) for t in (0, 50, 100, 500)] == [0.25, 0.5, 1.0, 1.0]
    assert policy.rate(1, 0) == policy.rate(0, 0) == 1.0
    assert PredictStash().rate(8, 0) == 1.0


@pytest.mark.parametrize("options", [{"ramp": -1}, {"clip": 0.5}, {"clip": float("nan")}])
def test_options_that_mean_nothing_are_refused(options):
    """Each with what it should be."""
    with pytest.raises(ValueError, match=r"ramp is a number|clip is a multiple"):
        PredictStash(**options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("basis-rotation", {"every": 0}, "every is a number of updates, at least 1, not 0"),
        ("basis-rotation", {"memory": 1}, "memory is at least 0 and less than 1, not 1"),
        ("2bw-ef", {"share": 0}, "share is a factor on an update, more than 0, not 0"),
    ],
)
def test_options_of_corrections_are_refused(name, options, message):
    """As soon as the policy is made."""
    with pytest.raises(ValueError, match=message):
        policy_named(name, options)


def test_names():
    """Every policy has the name of its key; another one is refused with the list."""
    assert [POLICIES[name]().name for name in POLICIES] == list(POLICIES)
    with pytest.raises(PolicyError, match="unknown policy 'bsp'; there are naive, stash"):
        policy_named("bsp")


def test_options_by_name():
    """As the command line has them; what is wrong is named with what there is."""
    assert policy_named("predict-stash", {"ramp": 20, "clip": 3}) == PredictStash(20, 3)
    with pytest.raises(ValueError, match="stash has no option clip; it has none"):
        policy_named("stash", {"clip": 3})
    with pytest.raises(ValueError, match="has no option speed; it has ramp, clip"):
        policy_named("predict-stash", {"speed": 3})
    with pytest.raises(ValueError, match=r"option clip .* is a number, not 'x'"):
        policy_named("predict-stash", {"clip": "x"})
