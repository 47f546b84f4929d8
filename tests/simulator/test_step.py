"""Sums of gradients in a simulated step: when they begin, what they wait for, what they hold up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost.buckets import BUCKET_BYTES
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import UpdateCost
from anabranch.schedule import SCHEDULES, asynchronous
from anabranch.schedule.asynchronous import split_batches
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Schedule
from anabranch.simulator import stream
from anabranch.simulator.costs import ModelCosts, StageTimes
from anabranch.simulator.events import play
from anabranch.simulator.program import compile_schedule, in_a_row
from anabranch.simulator.run import run, step_seconds
from anabranch.simulator.step import tables_of
from anabranch.timeline import Timeline
from tests.simulator.helpers import chain, cluster, cost_model, priced_stage_graphs, simulate
from tests.strategies import stage_graphs

NAMES = ("op0", "op1", "op2")


def three_buckets(bandwidth: float, *, replicas: int = 2, value_bytes: int = 0, devices: int = 4):
    """Three operators of 1 s forward and 1 s backward per sample, a full bucket of gradients each;
    two devices sum a bucket in 1 / ``bandwidth`` seconds.
    """
    machines = cluster(devices, bandwidth=bandwidth * BUCKET_BYTES, memory_bytes=10**12)
    return cost_model(
        chain(3),
        [1.0] * 3,
        [1.0] * 3,
        machines,
        parameter_bytes=BUCKET_BYTES,
        value_bytes=value_bytes,
    )


def sums(timeline: Timeline, device: int) -> list[tuple[float, float]]:
    """From when to when a device sums."""
    return [(s.start, s.end) for s in timeline.sums if s.device == device]


def replicated(batch_size: int = 4, **options: object) -> StageGraph:
    """One stage on devices 0 and 1."""
    return StageGraph((replace(Stage(NAMES, (0, 1), 2), **options),), (), batch_size)


def test_a_bucket_is_summed_as_soon_as_the_last_backward_has_passed_it():
    """Both replicas have B1 from 9 to 12; op2 is passed at 10, op1 at 11, op0 at its end. A bucket
    takes 1 s, so 1 s is left after the backward, not 3.
    """
    timeline = simulate(replicated(), three_buckets(1.0))
    assert sums(timeline, 0) == sums(timeline, 1) == [(10, 11), (11, 12), (12, 13)]
    assert timeline.step_s == 13
    assert timeline.makespan_s == 12


def test_buckets_wait_for_one_another():
    """A bucket takes 3 s: the first begins at 10, and the others follow without a pause."""
    timeline = simulate(replicated(), three_buckets(1 / 3))
    assert sums(timeline, 1) == [(10, 13), (13, 16), (16, 19)]
    assert timeline.step_s == 19


def test_shared_optimizer_state_is_half_of_the_ring_before_the_update_and_half_behind_it():
    """Each of three buckets takes half a second to who updates it; what was updated takes 1.5 s to
    the other.
    """
    cost = replace(three_buckets(1.0), shard_optimizer=True)
    timeline = simulate(replicated(), cost)
    assert sums(timeline, 0) == [(10, 10.5), (11, 11.5), (12, 12.5)]
    assert timeline.step_s == 14
    assert simulate(StageGraph((Stage(NAMES, (0,), 2),), (), 4), cost).step_s == 24


def test_a_recomputed_forward_comes_before_the_gradients():
    """The backward goes from 12 to 18, its first half is the forward again."""
    timeline = simulate(replicated(recompute=True), three_buckets(1.0))
    assert sums(timeline, 0) == [(16, 17), (17, 18), (18, 19)]


def test_the_slower_replica_decides():
    """The batch of 5 leaves 1 sample for replica 0 and none for replica 1 in the last micro-batch:
    replica 0 is the later one, its B2 goes from 15 to 18.
    """
    timeline = simulate(replicated(5), three_buckets(1.0))
    assert sums(timeline, 1) == [(16, 17), (17, 18), (18, 19)]


def test_a_large_bucket_is_cut_and_its_parts_follow_each_other():
    """One parameter of 4 buckets: final at once, at the end of the backward of 1 s."""
    machines = cluster(2, bandwidth=BUCKET_BYTES, memory_bytes=10**12)
    cost = cost_model((), [1.0], [1.0], machines, parameter_bytes=4 * BUCKET_BYTES)
    timeline = simulate(StageGraph((Stage(("op0",), (0, 1), 2),), (), 2), cost)
    assert sums(timeline, 0) == [(2, 3), (3, 4), (4, 5), (5, 6)]


def test_a_tied_parameter_waits_for_both_stages():
    """Stage 0 of op0 reads what stage 1 of op1 and op2 reads in op2: its last backward, from 10 to
    11 at the earliest, is the later one.
    """
    machines = cluster(2, bandwidth=BUCKET_BYTES, memory_bytes=10**12)
    cost = cost_model(
        chain(3), [1.0] * 3, [1.0] * 3, machines, parameter_bytes=BUCKET_BYTES, tied=(0, 2)
    )
    stages = (Stage(("op0",), (0,), 1), Stage(("op1", "op2"), (1,), 1))
    timeline = simulate(StageGraph(stages, ((0, 1),), 2), cost)
    ends = {s.device: s.end for s in timeline.spans if s.action.kind.is_compute}
    assert ends == {0: 10.0, 1: 9.0}
    assert sums(timeline, 0) == sums(timeline, 1) == [(10, 11)]


def test_sums_and_messages_take_turns_on_a_port():
    """Stage 1 has a replica for each of two samples. Its first bucket, final at 7, holds the ports
    until 9, so the gradients, sent at 7 and 8, arrive at 10 and 11; the second bucket comes after
    them.
    """
    cost = three_buckets(1 / 2, value_bytes=BUCKET_BYTES // 2)
    stages = (Stage(("op0",), (0,), 2), Stage(("op1", "op2"), (1, 2), 2))
    timeline = simulate(StageGraph(stages, ((0, 1),), 2), cost)
    spans = [
        (s.device, str(s.action.kind), s.start, s.end)
        for s in timeline.spans
        if s.action.kind.is_compute
    ]
    # Both messages forward leave device 0 by one port: they arrive at 3 and 4.
    assert spans == [
        (0, "F", 0.0, 2.0),
        (0, "B", 11.0, 13.0),
        (1, "F", 3.0, 5.0),
        (1, "B", 5.0, 7.0),
        (2, "F", 4.0, 6.0),
        (2, "B", 6.0, 8.0),
    ]
    assert sums(timeline, 1) == [(7, 9), (11, 13)]


def test_the_longest_all_reduce_that_a_search_meets_is_few_events():
    """400 full buckets are some 60 pieces; the first and the last are still single buckets."""
    count = 400
    machines = cluster(2, bandwidth=1e9, memory_bytes=10**15)
    cost = cost_model(
        chain(count), [1.0] * count, [1.0] * count, machines, parameter_bytes=BUCKET_BYTES
    )
    names = tuple(f"op{i}" for i in range(count))
    (work,) = ModelCosts(StageGraph((Stage(names, (0, 1), 2),), (), 2), cost).all_reduces()
    assert len(work.pieces) < 100
    assert work.nbytes == count * BUCKET_BYTES
    assert work.pieces[0].nbytes == work.pieces[-1].nbytes == BUCKET_BYTES


def test_a_parameter_of_a_petabyte_is_few_events():
    """2^50 bytes, final at once, are no 30 million buckets."""
    machines = cluster(2, bandwidth=1e9, memory_bytes=2**60)
    cost = cost_model((), [1.0], [1.0], machines, parameter_bytes=2**50)
    graph = StageGraph((Stage(("op0",), (0, 1), 2),), (), 2)
    (work,) = ModelCosts(graph, cost).all_reduces()
    assert len(work.pieces) == 1024
    assert work.nbytes == 2**50


@pytest.mark.parametrize(("bandwidth", "period_s"), [(1.0, 7.0), (1 / 3, 13.0)])
def test_without_a_flush_sums_begin_in_every_last_backward(bandwidth, period_s):
    """A mini-batch is one micro-batch of 3 + 3 s; of its sums 1 s is left, or 7 s if they are slow:
    the next forward waits for them, because it reads the new weights.
    """
    graph = asynchronous.warm_up(replicated(2))
    found = stream.steady(split_batches(graph), ModelCosts(graph, three_buckets(bandwidth)))
    assert found.period_s == pytest.approx(period_s)


def test_steps_in_a_row_hide_what_a_single_step_waits_for():
    """Stage 1 ends its last backward at 5 and sums until 9, the end of the step. Stage 0 is done at
    6, and what it makes from then on waits until 9: the second step ends at 17.

    stage 0   F0 F1 .. B0 .. B1 F0 F1 .. .. .. B0 .. B1
    stage 1   .. F0 B0 F1 B1 [  sum  ] F0 B0 F1 B1 [  sum  ]
    """
    machines = cluster(3, bandwidth=BUCKET_BYTES / 4, memory_bytes=10**12)
    cost = cost_model(
        chain(2), [0.5, 1.0], [0.5, 1.0], machines, parameter_bytes=BUCKET_BYTES, value_bytes=0
    )
    stages = (Stage(("op0",), (0,), 2), Stage(("op1",), (1, 2), 2))
    rule = SCHEDULES["1f1b"]()
    graph = rule.warm_up(StageGraph(stages, ((0, 1),), 4))
    order = rule.order(graph)
    assert step_seconds(graph, order, cost) == 9
    assert run(graph, order, cost, period=True).period_s == 8
    lowered = lower(order, graph)
    assert run(graph, lowered, cost, period=True).period_s == 8


def test_gathers_are_in_every_step_of_a_row():
    """Of two stages on the same two devices, gradients of the later one are summed by 3.5, of the
    first one by 4.5. Then the parameters of each stage take half a second to the other device::

        both devices   F0   F1   B1   B0                F0   F1   B1   B0
        sums                        [1 ]    [0 ]                     [1 ]    [0 ]
        gathers                               [0 ][1 ]                         [0 ][1 ]
        seconds        0    1    2    3    4.5   5  5.5  6.5  7.5  8.5
    """
    machines = cluster(2, bandwidth=BUCKET_BYTES, memory_bytes=10**12)
    cost = cost_model(chain(2), [1.0] * 2, [1.0] * 2, machines, parameter_bytes=BUCKET_BYTES)
    cost = replace(cost, shard_optimizer=True)
    graph = StageGraph(tuple(Stage((f"op{s}",), (0, 1), 2) for s in range(2)), ((0, 1),), 2)
    order = Schedule.parse("0: 0F0 1F0 1B0 0B0\n1: 0F0 1F0 1B0 0B0")
    assert step_seconds(graph, order, cost) == 5.5
    assert run(graph, order, cost, period=True).period_s == 5.5


@given(stage_graphs())
def test_a_step_in_a_row_takes_no_longer_than_alone(graph):
    """Whatever the next step waits for, it would have waited for after a barrier too."""
    costs = StageTimes([{1: 1.0 + s} for s in range(len(graph))], [{1: 2.0}] * len(graph))
    rule = SCHEDULES["1f1b"]()
    warm = rule.warm_up(graph)
    order = rule.order(warm)
    period_s = run(warm, order, costs, period=True).period_s
    assert period_s is not None
    assert period_s <= step_seconds(warm, order, costs) * (1 + 1e-9)


def test_the_order_with_messages_takes_as_long():
    """A schedule that was lowered before, as an executed plan is read back; shown or not."""
    cost = three_buckets(1 / 2, value_bytes=BUCKET_BYTES // 2)
    stages = (Stage(("op0",), (0,), 2), Stage(("op1", "op2"), (1, 2), 2))
    graph = StageGraph(stages, ((0, 1),), 4)
    rule = SCHEDULES["1f1b"]()
    warm = rule.warm_up(graph)
    whole = run(warm, lower(rule.order(warm), warm), cost, period=True)
    assert run(warm, rule.order(warm), cost, period=True) == whole
    computes = tuple(span for span in whole.spans if span.action.kind.is_compute)
    bare = run(warm, rule.order(warm), cost, period=True, messages=False)
    assert bare == replace(whole, spans=computes)


@given(priced_stage_graphs(), st.booleans())
def test_an_update_without_a_price_is_one_of_no_time(example, shard):
    """All-gathers come behind the update, for which all devices have agreed, whatever it costs:
    where it had no price, they began with the sums of their own stage.
    """
    graph, cost, schedule = example
    order = SCHEDULES[schedule]().order(graph)
    free, quick = (
        replace(cost, shard_optimizer=shard, profile=replace(cost.profile, update=update))
        for update in (UpdateCost(0.0, 0.0, 0.0), UpdateCost(1e-15, 0.0, 0.0))
    )
    assert step_seconds(graph, order, free) == pytest.approx(step_seconds(graph, order, quick))


def test_an_all_gather_waits_for_the_sums_of_all():
    """Stage 1 has summed at 3.5, stage 0, which computes until 4, at 4.5: only then do they agree,
    update and send each other what they have updated, although an update has no price.
    """
    machines = cluster(4, bandwidth=BUCKET_BYTES, memory_bytes=10**12)
    cost = cost_model(chain(2), [1.0] * 2, [1.0] * 2, machines, parameter_bytes=BUCKET_BYTES)
    stages = (Stage(("op0",), (0, 1), 2), Stage(("op1",), (2, 3), 2))
    graph = SCHEDULES["1f1b"]().warm_up(StageGraph(stages, ((0, 1),), 2))
    timeline = run(graph, SCHEDULES["1f1b"]().order(graph), replace(cost, shard_optimizer=True))
    gathers = {s.device: (s.start, s.end) for s in timeline.overheads if s.what == "gather"}
    assert gathers == dict.fromkeys(range(4), (4.5, 5.0))


@pytest.mark.parametrize(("cards", "seconds"), [(1, 16.0), (2, 8.0)])
def test_gathers_share_ports_as_sums_do(cards, seconds):
    """Two rings over the same network cards take turns, sharded optimizer or not: 2 * 8 s in all,
    but at once where each has a card; a gather is no work of processors that ranks share.
    """
    machines = replace(cluster(2, 2, bandwidth=1.0, cards=cards), cores=1)
    cost = cost_model(chain(2), [0, 0], [0, 0], machines, parameter_bytes=8)
    rows = [((0, 2), 2), ((1, 3), 2)]
    stages = (Stage((f"op{s}",), devices, size) for s, (devices, size) in enumerate(rows))
    graph = SCHEDULES["1f1b"]().warm_up(StageGraph(tuple(stages), ((0, 1),), 2))
    for shard in (False, True):
        assert simulate(graph, replace(cost, shard_optimizer=shard)).step_s == seconds


def test_steps_in_a_row_read_their_batches():
    """A step of 4 s alone, which is given its batch; in a row it reads two samples, 0.25 s each."""
    cost = cost_model((), [1], [1], cluster(1))
    reading = replace(cost, profile=replace(cost.profile, read_sample_s=0.25))
    graph = StageGraph((Stage(("op0",), (0,), 1),), (), 2)
    order = SCHEDULES["1f1b"]().order(SCHEDULES["1f1b"]().warm_up(graph))
    timeline = run(graph, order, reading, period=True)
    assert (timeline.step_s, timeline.period_s) == (4.0, 4.5)


@given(priced_stage_graphs(), st.booleans())
def test_machine_code_does_the_same_as_python(example, shard):
    """To the last bit."""
    graph, cost, schedule = example
    costs = ModelCosts(graph, replace(cost, shard_optimizer=shard))
    program = compile_schedule(SCHEDULES[schedule]().order(graph), graph, costs)
    program = in_a_row(program, 3, 0.0)
    compiled, plain = tables_of(program, costs), tables_of(program, costs)
    play(compiled)
    play.py_func(plain)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.tobytes() == theirs.tobytes()
