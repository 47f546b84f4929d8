"""What a step would be without one of its causes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Level
from anabranch.profile.profile import OpCost, UpdateCost
from anabranch.schedule import SCHEDULES, SPLIT_BACKWARDS, compute_order
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import run
from anabranch.solve.explanation.what_ifs import what_ifs
from anabranch.solve.settings import SETTINGS
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph


def relaxed(graph, cost, schedule="1f1b"):
    """{change: seconds}, and the step as it is."""
    timeline = run(graph, compute_order(graph, schedule), ModelCosts(graph, cost))
    found = what_ifs(graph, schedule, cost, replace(timeline, spans=computes(timeline)))
    assert [r.step_s for r in found] == sorted(r.step_s for r in found)
    return {r.change: r.step_s for r in found}, timeline.step_s


def computes(timeline):
    """Spans without messages."""
    return tuple(span for span in timeline.spans if span.action.kind.is_compute)


def warm(graph, schedule="1f1b"):
    """With its in-flight counts."""
    return SCHEDULES[schedule]().warm_up(graph)


def test_one_micro_batch_on_a_chain():
    """F 1, message 1.5, F 3, B 3, message 1.5, B 1: 11 s. Without latency (.5) 10, without
    bandwidth's share 9. With 2 s for each F and B it takes as long.
    """
    cost = cost_model(
        chain(2), [1, 3], [1, 3], cluster(2, bandwidth=1.0, latency_s=0.5), value_bytes=1
    )
    found, step_s = relaxed(warm(stage_graph(chain(2), [(0,), (1,)], 1)), cost)
    assert step_s == 11.0
    assert found == {
        "fast_links": pytest.approx(9.0),
        "no_latency": 10.0,
        "even_stages": pytest.approx(11.0),
    }


def test_even_stages_have_the_work_of_the_plan():
    """Two micro-batches: 1 s before the second stage begins, 12 there, 1 behind; evened 2, 8, 2."""
    cost = cost_model(chain(2), [1, 3], [1, 3], cluster(2))
    found, step_s = relaxed(warm(stage_graph(chain(2), [(0,), (1,)], 2)), cost)
    assert step_s == pytest.approx(14.0)
    assert found["even_stages"] == pytest.approx(12.0)


def test_updates_are_a_change_of_their_own():
    """One device computes for 3 s and updates 4 bytes in 2 s."""
    update = UpdateCost(0.0, 0.0, 0.5)
    alone = cost_model((), [1], [2], cluster(1), parameter_bytes=4)
    alone = replace(alone, profile=replace(alone.profile, update=update))
    assert relaxed(warm(stage_graph((), [(0,)], 1)), alone) == ({"free_update": 3.0}, 5.0)


def test_all_reduces_and_the_network_between_nodes():
    """Two nodes of one device sum 4 bytes at 1 byte/s for 4 s after 3 s of compute."""
    levels = Level("node", 1, 1e15, 0.0), Level("network", 2, 1.0, 0.0)
    machines = replace(cluster(1), levels=levels)
    cost = cost_model((), [1], [2], machines, parameter_bytes=4)
    found, step_s = relaxed(warm(stage_graph((), [(0, 1)], 2, [2])), cost)
    assert step_s == 7.0
    assert found == {"fast_links": pytest.approx(3.0), "fast_network": 5.0, "free_all_reduce": 3.0}


def test_recompute_and_counts_in_flight_are_what_memory_would_buy():
    """Without recompute each backward is a forward shorter; with three in flight instead of two,
    stage 0 has more to do while the first message is on its way there and back.

    device 0   F0 F1 .  .  .  B0 F2 B1 F3 .  .  B2 ...     messages of 1 s, F and B of 1 s
    device 1   .  .  F0 B0 F1 B1 .  .  F2 B2 F3 B3 ...
    """
    graph = warm(stage_graph((), [(0,)], 4))
    graph = replace(graph, stages=(replace(graph.stages[0], recompute=True),))
    found, step_s = relaxed(graph, cost_model((), [1], [2], cluster(1)))
    assert step_s == 16.0
    assert found == {"no_recompute": 12.0}
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, latency_s=1.0), value_bytes=1)
    found, step_s = relaxed(warm(stage_graph(chain(2), [(0,), (1,)], 6)), cost)
    assert step_s == pytest.approx(20.0)
    assert found["more_in_flight"] < step_s
    assert found["no_latency"] == pytest.approx(14.0)


def test_a_step_that_takes_long_to_simulate_is_not_changed_often(monkeypatch):
    """Two micro-batches on two devices have 8 computes: 16 are two steps."""
    machines = cluster(2, bandwidth=1.0, latency_s=1.0)
    cost = cost_model(chain(2), [1, 1], [1, 1], machines, value_bytes=1)
    graph = warm(stage_graph(chain(2), [(0,), (1,)], 2))
    everything, _ = relaxed(graph, cost)
    assert len(everything) == 3
    for most, count in ((7, 0), (15, 1), (16, 2), (100_000, len(everything))):
        settings = replace(SETTINGS, most_computes=most)
        monkeypatch.setattr("anabranch.solve.explanation.what_ifs.SETTINGS", settings)
        assert len(relaxed(graph, cost)[0]) == count


def test_slices_at_their_best():
    """A slice of one sample takes as long as one of two: both devices have one sample, 3 s."""
    cost = cost_model((), [1], [2], cluster(2))
    costs = (OpCost((1.0, 1.0), (2.0, 2.0), 0),)
    measured = replace(cost.profile, samples=(1, 2), costs=costs, proportional=False)
    found, step_s = relaxed(
        warm(stage_graph((), [(0, 1)], 2, [2])), replace(cost, profile=measured)
    )
    assert (step_s, found["best_slices"]) == (3.0, 1.5)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(sorted(SCHEDULES)),
    st.booleans(),
)
def test_no_change_lengthens_a_chain(stages, microbatches, schedule, recompute):
    """On a chain no message gets in another's way, so less of anything is never worse. A split
    backward sends its gradient while a value may be on its way: there messages take no time.
    """
    count = len(stages)
    links = {} if schedule in SPLIT_BACKWARDS else {"bandwidth": 3.0, "latency_s": 0.5}
    graph = warm(stage_graph(chain(count), [(i,) for i in range(count)], microbatches), schedule)
    graph = replace(graph, stages=tuple(replace(s, recompute=recompute) for s in graph.stages))
    cost = cost_model(
        chain(count),
        [f for f, _ in stages],
        [b for _, b in stages],
        cluster(1, count, **links),
        value_bytes=5,
        parameter_bytes=7,
    )
    found, step_s = relaxed(graph, cost, schedule)
    assert all(seconds <= step_s * (1 + 1e-9) for seconds in found.values())
