"""Lists with split backwards: as published on chains, and right on any stage graph."""

from dataclasses import replace

import pytest
from hypothesis import given

from anabranch.errors import InvalidScheduleError
from anabranch.plans.in_flight import with_in_flight
from anabranch.plans.stages import StageGraph
from anabranch.schedule.check import check
from anabranch.schedule.kfkb import KFKB
from anabranch.schedule.lower import lower
from anabranch.schedule.zero_bubble import InputsFirst, ZeroBubble
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import simulate
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.strategies import stage_graphs


def row(stages: int, microbatches: int) -> StageGraph:
    """Equal stages in a row, one sample in each micro-batch."""
    return stage_graph(chain(stages), [(i,) for i in range(stages)], microbatches)


def step_s(rule: KFKB | InputsFirst | ZeroBubble, graph: StageGraph, *, back: float = 2.0) -> float:
    """Seconds of a step whose forwards take 1 s."""
    count = len(graph)
    cost = cost_model(graph.edges, [1.0] * count, [back] * count, cluster(count))
    filled = rule.warm_up(graph)
    return simulate(filled, rule.order(filled), ModelCosts(filled, cost)).end


def test_gradients_of_weights_fill_the_gaps():
    """A chain of three: the last stage sends gradients back at once, and computes those of its
    weights when it holds three micro-batches, or has nothing else to do.
    """
    filled = ZeroBubble().warm_up(row(3, 4))
    assert str(ZeroBubble().order(filled)).splitlines() == [
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1: 1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3",
        "2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_halves_at_once():
    """As the rule has it, but the gradient of the inputs can be sent before the other half."""
    filled = InputsFirst().warm_up(row(2, 2))
    assert str(InputsFirst().order(filled)) == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1I0 1W0 1F1 1I1 1W1"


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 4), (4, 16), (6, 12), (8, 8)])
def test_a_row_takes_what_is_published(stages, microbatches):
    """Of 1F1B's bubble of 3 (p - 1) forwards p - 1 are left (H1: (p - 1)(F + I - W), section 2.2);
    less cannot be where the first forward and the last update are in the step. The simulator takes
    both halves as equal.
    """
    graph, work = row(stages, microbatches), 3.0 * microbatches
    assert step_s(KFKB(), graph) == work + 3 * (stages - 1)
    best = min(step_s(rule, graph) for rule in (ZeroBubble(), ZeroBubble(memory=2)))
    assert best == work + stages - 1
    assert step_s(ZeroBubble(), graph) <= 1.05 * best
    assert best <= step_s(InputsFirst(), graph) <= step_s(KFKB(), graph)


def test_no_more_memory_than_the_fullest_stage():
    """H1 holds what the first stage of 1F1B holds, H2 twice as much, none more than there is."""
    graph = row(4, 16)
    assert [s.in_flight for s in ZeroBubble().warm_up(graph).stages] == [4, 4, 4, 4]
    assert [s.in_flight for s in ZeroBubble(2).warm_up(graph).stages] == [8, 8, 8, 8]
    room = ZeroBubble(2).warm_up(graph, lambda s: 5 if s == 1 else 100)
    assert [s.in_flight for s in room.stages] == [8, 5, 5, 5]


@given(stage_graphs(max_stages=5))
def test_it_is_never_longer_than_1f1b(graph):
    """Where stages are as balanced as the rule takes them to be."""
    graph = stage_graph(graph.edges, [(i,) for i in range(len(graph))], 12)
    assert step_s(ZeroBubble(), graph) <= step_s(KFKB(), graph)


def test_too_few_in_flight_is_refused():
    """A micro-batch of the second stage needs two of the first, which may hold one."""
    graph = stage_graph(chain(2), [(0,), (1,)], 4, [1, 2])
    with pytest.raises(InvalidScheduleError, match="may hold too few micro-batches"):
        ZeroBubble().order(with_in_flight(graph, (1, 2)))
    with pytest.raises(InvalidScheduleError, match="may hold too few micro-batches"):
        ZeroBubble().order(graph)  # in_flight is 0


def test_counts_may_rise_along_an_edge():
    """What stages hold at most follows from the list, and the list from what they may hold."""
    graph = stage_graph(chain(3), [(i,) for i in range(3)], 8, [1, 2, 1])
    filled = ZeroBubble(2).warm_up(graph)
    again = with_in_flight(graph, (stage.in_flight for stage in filled.stages))
    assert str(ZeroBubble(2).order(again)) == str(ZeroBubble(2).order(filled))


def ordered(rule: ZeroBubble, **lengths: float) -> list[str]:
    """The lists of a chain of three whose passes have other lengths."""
    graph = row(3, 4)
    stages = tuple(replace(stage, **lengths) for stage in graph.stages)
    filled = rule.warm_up(replace(graph, stages=stages))
    check(lower(rule.order(filled), filled), filled)
    return str(rule.order(filled)).splitlines()


def test_long_gradients_of_weights_wait_for_larger_gaps():
    """Of a backward of 2 s, weights take 1.8 s: the gradients that others wait for go first."""
    assert ordered(ZeroBubble(), weight_share=0.9)[1].startswith("1: 1F0 1F1 1F2 1I0 1I1 1W0")
    assert ordered(ZeroBubble())[1].startswith("1: 1F0 1F1 1F2 1I0 1W0 1I1")


def test_messages_take_time():
    """Of half a second each way: the first gradients come to the middle stage 1 s later, and four
    forwards fit before them where memory allows.
    """
    assert ordered(ZeroBubble(2), message=0.0)[1].startswith("1: 1F0 1F1 1F2 1I0 1F3")
    assert ordered(ZeroBubble(2), message=1 / 6)[1].startswith("1: 1F0 1F1 1F2 1F3 1I0")


def test_passes_of_unequal_stages_are_as_short_as_can_be():
    """A middle stage of half the work: the others are busy from the first forward on."""
    graph = row(3, 6)
    stages = [replace(s, load=load) for s, load in zip(graph.stages, (1, 0.5, 1), strict=True)]
    graph = ZeroBubble().warm_up(replace(graph, stages=tuple(stages)))
    cost = cost_model(graph.edges, [1.0, 0.5, 1.0], [2.0, 1.0, 2.0], cluster(3))
    step = simulate(graph, ZeroBubble().order(graph), ModelCosts(graph, cost))
    assert step.end == pytest.approx(1.5 + 6 * 3)


def test_replicas_share_their_order():
    """One object, which is compiled once."""
    graph = ZeroBubble().warm_up(stage_graph(chain(2), [(0, 1), (2,)], 8, [2, 2]))
    actions = ZeroBubble().order(graph).actions
    assert actions[0] is actions[1]
