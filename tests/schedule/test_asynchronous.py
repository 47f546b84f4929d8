"""Stages where no batch ends: what they hold, which cannot do without a flush, and rounds of
mini-batches that replicas take in turn.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import DeadlockError, InvalidPlanError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule import asynchronous
from anabranch.schedule.asynchronous import AsynchronousOrder, round_robin
from anabranch.schedule.schedule import Schedule
from tests.simulator.helpers import chain, stage_graph
from tests.strategies import stage_graphs


def one_by_one(count: int, batch_size: int, size: int):
    """A chain with a device per stage."""
    return stage_graph(chain(count), [(i,) for i in range(count)], batch_size, [size] * count)


@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (8, 8), (8, 1)])
def test_the_full_pipeline(batch_size, size):
    """The longest distance to the sink plus 1, also where that is more than a mini-batch has."""
    graph = asynchronous.warm_up(one_by_one(4, batch_size, size))
    assert [stage.in_flight for stage in graph.stages] == [4, 3, 2, 1]
    assert graph.batch_size == batch_size


@pytest.mark.parametrize(
    ("batch_size", "sizes", "k", "message"),
    [
        (10, [4, 4], 1, r"micro-batches of 4 samples, which do not divide a mini-batch of 10"),
        (8, [4, 2], 1, r"stage 0 has micro-batches of 4 samples, stage 1 of 2"),
        (8, [2, 2], 2, r"alternates groups of 2"),
    ],
)
def test_what_cannot_run_without_a_flush(batch_size, sizes, k, message):
    """Each with its reason."""
    graph = stage_graph(chain(2), [(0,), (1,)], batch_size, sizes)
    graph = replace(graph, stages=tuple(replace(stage, k=k) for stage in graph.stages))
    with pytest.raises(InvalidPlanError, match=message):
        asynchronous.warm_up(graph)


# Rounds


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
    """Ranks that do what ``Stream`` and ``AsyncPipeline`` do, without doing anything.

    Each is a row of waits: for activations, for gradients, for the others of a round, and for what
    earlier mini-batches came to on all ranks.
    """

    def __init__(self, rounds: AsynchronousOrder, count: int, late: int) -> None:
        self.rounds, self.count, self.late = rounds, count, late
        self.forwards: set[tuple[int, int]] = set()
        self.backwards: set[tuple[int, int]] = set()
        self.told = {(s, r): 0 for s, n in enumerate(rounds.turns) for r in range(n)}

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
        replicas, held = self.rounds.turns[s], self.rounds.in_flight[s]
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
        replicas = self.rounds.turns[s]
        start = n // replicas * replicas
        together = range(start, min(start + replicas, self.count))
        yield lambda: all((s, m) in self.backwards for m in together)


def ends(rounds: AsynchronousOrder, count: int = 40, late: int | None = None) -> bool:
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
    rounds = round_robin(graph_of(replicas))
    assert rounds.in_flight == in_flight
    assert in_flight[0] == -(-sum(replicas) // replicas[0])


def test_counts_where_branches_join() -> None:
    """The branch with more devices counts, though the other one has more stages."""
    edges = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4)]
    rounds = round_robin(graph_of((2, 4, 1, 1, 1), edges))
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
    rounds = round_robin(whole, per_hop=per_hop)
    whole = asynchronous.full_pipeline(whole, per_hop=per_hop)
    assert rounds.in_flight == tuple(stage.in_flight for stage in whole.stages)
    whole = replace(whole, batch_size=1)
    given = AsynchronousOrder(whole, 1).schedule(3)[1]
    assert given.actions == round_robin(whole, per_hop=per_hop).schedule(3)[1].actions
    assert rounds.late == max(rounds.in_flight)
    for s in range(len(whole)):
        assert rounds.deepest(s) == max(rounds.in_flight)


@given(stage_graphs(max_stages=5, max_replicas=4), st.sampled_from([1, 2]))
def test_nobody_waits_for_itself(graph: StageGraph, per_hop: int) -> None:
    """On any stage graph with any replicas, at any speeds, and wherever the run ends."""
    rounds = round_robin(graph, per_hop=per_hop)
    for count in (1, rounds.late, 3 * rounds.late + 1):
        assert ends(rounds, count)


@given(stage_graphs(max_stages=3, max_replicas=3), st.data())
def test_counts_by_hand_are_accepted_if_they_cannot_deadlock(
    graph: StageGraph, data: st.DataObject
) -> None:
    """And refused if they do: the condition is neither too strict nor too lax."""
    rounds = round_robin(graph)
    stages = (replace(s, in_flight=data.draw(st.integers(1, 4))) for s in rounds.graph.stages)
    rounds = replace(rounds, graph=replace(rounds.graph, stages=tuple(stages)))
    try:
        rounds.schedule()
    except DeadlockError:
        assert not ends(rounds)
    else:
        assert ends(rounds)


def test_a_deadlock_over_an_update_is_told() -> None:
    """Stage 1 wants the forward of 2 before the backward of 1, stage 0 the sum of 0 and 1 first."""
    rounds = round_robin(graph_of((2, 1)))
    stages = [replace(s, in_flight=n) for s, n in zip(rounds.graph.stages, (1, 2), strict=True)]
    rounds = replace(rounds, graph=replace(rounds.graph, stages=tuple(stages)))
    with pytest.raises(DeadlockError, match=r"device 0, .* that sum gradients with it: .*>>0U0<<"):
        rounds.schedule()


def test_updates_are_in_the_schedule() -> None:
    """Of two replicas each has its own mini-batches, and both make the update of a round."""
    _, schedule = round_robin(graph_of((2, 1))).schedule(1)
    assert str(schedule).splitlines() == [
        "0: 0F0 0SF0>1@2[0:4] 0RB0<1@2[0:4] 0B0 0U0",
        "1: 0F0 0SF0>1@2[4:8] 0RB0<1@2[4:8] 0B0 0U0",
        "2: 1RF0<0@0[0:4] 1F0 1B0 1SB0>0@0[0:4] 1U0 1RF1<0@1[4:8] 1F1 1B1 1SB1>0@1[4:8] 1U1",
    ]
    assert Schedule.parse(str(schedule)) == schedule


def test_a_loss_is_asked_for_when_the_last_replica_may_have_learned() -> None:
    """One stage, two replicas: both learn from round 0 when the second one gets mini-batch 3, so
    whoever waits for the loss of mini-batch 0 after 2 keeps it from coming.
    """
    rounds = round_robin(graph_of((2,)))
    assert rounds.late == 3
    assert ends(rounds, late=3)
    assert not ends(rounds, late=2)


def test_places_count_in_updates_of_the_stage() -> None:
    """Devices to the sink 4, 2, 1. Stage 1 is 2 mini-batches from the source, which are 2 of its
    updates; with two replicas they would be 1.
    """
    first, last = round_robin(graph_of((2, 1, 1))), round_robin(graph_of((1, 1, 2)))
    assert first.in_flight == (2, 2, 1)
    assert [first.deepest(s) for s in range(3)] == [2, 4, 4]
    assert last.in_flight == (4, 3, 1)
    assert [last.deepest(s) for s in range(3)] == [4, 4, 2]
