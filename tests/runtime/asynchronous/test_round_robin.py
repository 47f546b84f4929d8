"""Rounds of mini-batches: how many are in flight, who sends to whom, and that nobody waits for
itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InfeasiblePlanError, InvalidScheduleError
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime.asynchronous.requirements import round_robin_of
from anabranch.runtime.asynchronous.round_robin import RoundRobin, budgeted
from anabranch.runtime.messages import channels
from anabranch.runtime.transport.base import Channel
from anabranch.schedule.kfkb import KFKB
from anabranch.weights import Stash
from tests.runtime.asynchronous.models import cut
from tests.runtime.asynchronous.running import plan_of, refusal
from tests.strategies import stage_graphs

Waiting = Generator[Callable[[], bool], None, None]


def graph_of(replicas: Sequence[int], edges: Sequence[tuple[int, int]] = ()) -> StageGraph:
    """Stages with so many replicas; in a chain unless edges are given."""
    firsts = [sum(replicas[:s]) for s in range(len(replicas))]
    stages = tuple(
        Stage((f"op{s}",), tuple(range(first, first + count)), 4)
        for s, (first, count) in enumerate(zip(firsts, replicas, strict=True))
    )
    chain = [(s, s + 1) for s in range(len(replicas) - 1)]
    return StageGraph(stages, tuple(edges or chain), 4)


class Simulated:
    """Ranks that do what ``RoundRobinStream`` and ``AsyncPipeline`` do, without doing anything.

    Each is a row of waits: for activations, for gradients, for the others of a round, and for what
    earlier mini-batches came to on all ranks.
    """

    def __init__(self, rounds: RoundRobin, count: int, late: int) -> None:
        self.rounds, self.count, self.late = rounds, count, late
        self.forwards: set[tuple[int, int]] = set()
        self.backwards: set[tuple[int, int]] = set()
        self.told = {(s, r): 0 for s, n in enumerate(rounds.replicas) for r in range(n)}

    def ends(self) -> bool:
        """Whether all ranks come to their end, however long each of them takes."""
        ranks = [(self.rank(s, r), [lambda: True]) for s, r in self.told]
        is_moving = True
        while ranks and is_moving:
            is_moving = False
            for rank, waits in list(ranks):
                while waits[0]():
                    is_moving = True
                    wait = next(rank, None)
                    if wait is None:
                        ranks.remove((rank, waits))
                        break
                    waits[0] = wait
        return not ranks

    def rank(self, s: int, r: int) -> Waiting:
        replicas, held = self.rounds.replicas[s], self.rounds.in_flight[s]
        flying: deque[int] = deque()
        for n in range(self.count):
            if n % replicas == r:
                if len(flying) == held:
                    yield from self.learn(s, flying.popleft())
                yield self.has_arrived(s, n)
                self.forwards.add((s, n))
                flying.append(n)
            # Those in a row that are learned, or others'.
            first = flying[0] if flying else n + 1
            self.told[s, r] = min(first, n + 1)
            yield self.is_told(n - self.late)
        while flying:
            yield from self.learn(s, flying.popleft())
        yield from self.sum(s, self.count - 1)

    def has_arrived(self, s: int, n: int) -> Callable[[], bool]:
        before = self.rounds.graph.predecessors[s]
        return lambda: all((x, n) in self.forwards for x in before)

    def is_told(self, n: int) -> Callable[[], bool]:
        return lambda: min(self.told.values()) > n

    def learn(self, s: int, n: int) -> Waiting:
        after = self.rounds.graph.successors[s]
        yield lambda: all((y, n) in self.backwards for y in after)
        self.backwards.add((s, n))
        yield from self.sum(s, n)

    def sum(self, s: int, n: int) -> Waiting:
        replicas = self.rounds.replicas[s]
        start = n // replicas * replicas
        together = range(start, min(start + replicas, self.count))
        yield lambda: all((s, m) in self.backwards for m in together)


def ends(rounds: RoundRobin, count: int = 40, late: int | None = None) -> bool:
    return Simulated(rounds, count, rounds.late if late is None else late).ends()


@pytest.mark.parametrize(
    ("replicas", "in_flight"),
    [
        ((1, 1, 1), (3, 2, 1)),  # as without rounds
        ((2, 1), (2, 1)),  # NOAM: ceil(3 / 2)
        ((2, 1, 1), (2, 2, 1)),
        ((1, 2), (3, 1)),  # ceil(3 / 1)
        ((2, 2), (2, 1)),
        ((15, 1), (2, 1)),  # VGG-16 in PipeDream's paper
        ((3, 2, 2), (3, 2, 1)),
    ],
)
def test_counts_of_chains(replicas: tuple[int, ...], in_flight: tuple[int, ...]) -> None:
    """The input stage has NOAM, the devices divided by its own; the last waits for nothing."""
    rounds = RoundRobin.of(graph_of(replicas))
    assert rounds.in_flight == in_flight
    assert in_flight[0] == -(-sum(replicas) // replicas[0])


def test_counts_where_branches_join() -> None:
    """The branch with more devices counts, though the other one has more stages."""
    edges = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4)]
    rounds = RoundRobin.of(graph_of((2, 4, 1, 1, 1), edges))
    #   0 (2) -> 1 (4) ----------> 4 (1)       devices to the sink: 7 | 5 | 3, 2 | 1
    #         -> 2 (1) -> 3 (1) ->
    assert rounds.in_flight == (4, 2, 3, 2, 1)
    assert rounds.late == 11  # stage 1: rounds 0 and 1, and the rest of round 2


@given(stage_graphs(max_replicas=1), st.sampled_from([1, 2]))
def test_without_replicas_rounds_are_minibatches(graph: StageGraph, per_hop: int) -> None:
    """Counts are those of any asynchronous plan."""
    whole = StageGraph(
        tuple(Stage(each.operators, each.devices, 1) for each in graph.stages), graph.edges, 99
    )
    rounds = RoundRobin.of(whole, per_hop)
    warm = KFKB(per_hop).warm_up(whole)
    assert rounds.in_flight == tuple(stage.in_flight for stage in warm.stages)
    assert rounds.late == max(rounds.in_flight)
    for s in range(len(whole)):
        assert rounds.deepest(s) == max(rounds.in_flight)


@given(stage_graphs(max_stages=5, max_replicas=4), st.sampled_from([1, 2]))
def test_nobody_waits_for_itself(graph: StageGraph, per_hop: int) -> None:
    """On any stage graph with any replicas, at any speeds, and wherever the run ends."""
    rounds = RoundRobin.of(graph, per_hop)
    for count in (1, rounds.late, 3 * rounds.late + 1):
        assert ends(rounds, count)


@given(stage_graphs(max_stages=3, max_replicas=3), st.data())
def test_counts_by_hand_are_accepted_if_they_cannot_deadlock(
    graph: StageGraph, data: st.DataObject
) -> None:
    """And refused if they do: the condition is neither too strict nor too lax."""
    counts = tuple(data.draw(st.integers(1, 4)) for _ in graph.stages)
    try:
        rounds = RoundRobin(graph, counts)
    except InvalidScheduleError:
        unchecked = object.__new__(RoundRobin)
        object.__setattr__(unchecked, "graph", graph)
        object.__setattr__(unchecked, "in_flight", counts)
        assert not ends(unchecked)
    else:
        assert ends(rounds)


def test_a_refusal_says_what_would_do() -> None:
    """Stage 1 wants the forward of 1 before the backward of 0, stage 0 the sum of 0 and 1 first."""
    with pytest.raises(InvalidScheduleError, match="let it have 2 or more in flight"):
        RoundRobin(graph_of((2, 1)), (1, 2))
    with pytest.raises(ValueError, match="no counts for 2 stages"):
        RoundRobin(graph_of((2, 1)), (1,))


def test_a_loss_is_asked_for_when_the_last_replica_may_have_learned() -> None:
    """One stage, two replicas: both learn from round 0 when the second one gets mini-batch 3, so
    whoever waits for the loss of mini-batch 0 after 2 keeps it from coming.
    """
    rounds = RoundRobin.of(graph_of((2,)))
    assert rounds.late == 3
    assert ends(rounds, late=3)
    assert not ends(rounds, late=2)


def test_places_count_in_updates_of_the_stage() -> None:
    """Devices to the sink 4, 2, 1. Stage 1 is 2 mini-batches from the source, which are 2 of its
    updates; with two replicas they would be 1.
    """
    first, last = RoundRobin.of(graph_of((2, 1, 1))), RoundRobin.of(graph_of((1, 1, 2)))
    assert first.in_flight == (2, 2, 1)
    assert [first.deepest(s) for s in range(3)] == [2, 4, 4]
    assert last.in_flight == (4, 3, 1)
    assert [last.deepest(s) for s in range(3)] == [4, 4, 2]


@given(stage_graphs(max_replicas=4), st.integers(0, 60))
def test_every_message_has_its_channel(graph: StageGraph, turn: int) -> None:
    """What the stages of a mini-batch send to each other goes through channels that are known
    beforehand, and there are no others.
    """
    rounds = RoundRobin.of(graph)

    def used(turn: int) -> set[Channel]:
        """Channels of one mini-batch, between ranks of the whole plan."""
        one = rounds.one(turn, 3)
        rank = [graph.rank_of[device] for device in one.devices]
        return {Channel(rank[c.sender], rank[c.receiver], c.tag) for c in channels(one)}

    assert used(turn) <= set(rounds.channels())
    assert set().union(*(used(i) for i in range(12))) == set(rounds.channels())


@pytest.mark.dist
def test_memory_is_that_of_whole_minibatches() -> None:
    """The plan's own prediction is for halves of them; memory for the wholes is asked for first."""
    model = cut("chain 2")

    def expected(samples: int) -> Plan:
        chosen = plan_of(model, samples, replicas=(2, 1))
        known = replace(chosen, predicted=Prediction(1.0, 1.0, 0.0, (1, 1, 1)))
        rounds = round_robin_of(known)
        assert rounds is not None
        return budgeted(known, rounds, model.captured, Stash())

    peaks, twice = (expected(n).predicted.device_peak_bytes for n in (1 << 12, 1 << 13))
    assert peaks[0] == peaks[1] > peaks[2]
    # Of two mini-batches in flight: what enters the layer norm and what leaves tanh is one tensor,
    # which leaves the linear layer another; 6 numbers of 4 bytes for each of 4096 samples.
    assert twice[0] - peaks[0] > 2 * (1 << 12) * 6 * 4
    assert twice[0] < 2 * peaks[0]  # weights do not grow
    text = refusal(model, expected(1 << 40), InfeasiblePlanError)
    assert "by the plan's prediction" in text
