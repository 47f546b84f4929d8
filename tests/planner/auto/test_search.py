"""One search: its proposals, what lies near one of them, and where each comes from."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from anabranch.compiled import forked
from anabranch.planner.auto.draft import Draft, draft_of, stage_graph_of
from anabranch.planner.auto.search import Search
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.base import PLAIN_RUN, RunOptions
from anabranch.plans.stages import StageGraph
from tests.planner.auto.test_annealing import slowest
from tests.planner.auto.test_moves import CHAIN, draft, space

WHERE = space(CHAIN)


def stages(op_stage: str, device_stage: str) -> StageGraph:
    return stage_graph_of(draft(op_stage, device_stage, microbatch=8), WHERE.cost, WHERE.batch_size)


SHARED = RunOptions(shared=True)
UNEVEN = stages("000111", "000001")


def priced(found: Draft, limit: float) -> float:
    """As ``slowest``, where every replica has samples."""
    short = (found.microbatch < np.bincount(found.device_stage)).any()
    return math.inf if short else slowest(found, limit)


def search(evaluations: int, evaluate=priced, rounds: Sequence[int] = ()) -> Search:
    starts = [("hand", UNEVEN), ("hand", UNEVEN)]
    return Search(WHERE, evaluate, starts, evaluations, rounds=rounds)


def test_starts_come_first_and_the_best_is_found():
    """Each start once, as it was given."""
    found = search(500)
    proposals = list(found)
    assert proposals[0] == UNEVEN
    assert proposals.count(UNEVEN) == 1
    best = proposals[1]
    assert len(best) == 1
    assert found.origin(UNEVEN) == "started from the plan of hand"
    assert re.match(r"found from the plan of hand by \d+ changes? to", found.origin(best))


def test_what_lies_near():
    """The quickest of what a move or two make, which are counted; nothing much slower."""
    found = search(0)
    assert next(iter(found)) == UNEVEN
    _, *near = found.near(UNEVEN)
    assert len(near[0]) == 1
    assert re.match(r"found from the plan of hand by [12] change", found.origin(near[0]))
    limit = 1.05 * slowest(draft("000111", "000001"), math.inf)
    seconds = [slowest(draft_of(graph, WHERE.cost), math.inf) for graph in near]
    assert seconds == sorted(seconds)
    assert seconds[-1] < limit
    assert len(near) <= SETTINGS.near
    again = tuple(replace(stage, recompute=True) for stage in UNEVEN.stages)
    first, *_ = found.near(replace(UNEVEN, stages=again))
    assert first == UNEVEN  # as quick, perhaps, without


def test_what_may_gain_by_sharing_the_state():
    """The quickest first, as they are where replicas share it; and what lies near is, too."""
    asked: list[bool] = []

    def shared(found: Draft, limit: float) -> float:
        asked.append(found.sharded)
        return priced(found, math.inf) / (1 + found.sharded)

    found = search(0, shared)
    whole, even = stages("000000", "000000"), stages("000111", "000111")
    assert found.promising([UNEVEN, even, whole], SHARED, 0.51) == [whole, even]
    assert found.promising([UNEVEN, even, whole], SHARED, 0.47) == []
    found.near(UNEVEN, SHARED)
    assert all(asked)


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    """What was found until then is proposed, and then the interrupt goes on."""
    monkeypatch.setattr(forked, "cores", lambda: 1)
    asked: list[Draft] = []

    def interrupted(found: Draft, limit: float) -> float:
        asked.append(found)
        if len(asked) == 500:
            raise KeyboardInterrupt
        return priced(found, limit)

    def proposals() -> Iterator[StageGraph]:
        yield from search(10_000, interrupted)

    found: list[StageGraph] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(proposals())
    assert found[0] == UNEVEN
    assert len(found) > 3


def test_more_evaluations_only_add_rounds():
    """Each round begins with the best plan, and proposes the same whatever rounds come after it."""
    few, many = search(100, rounds=[200]), search(100, rounds=[200, 200])
    assert list(few) == list(many)
    first = many.again(UNEVEN, PLAIN_RUN, PLAIN_RUN)
    assert few.again(UNEVEN, PLAIN_RUN, PLAIN_RUN) == first
    assert len(first[0][0]) == 1
    assert all("plan of hand" in many.origin(graph) for graph, _ in first)
    second = many.again(UNEVEN, PLAIN_RUN, PLAIN_RUN)
    assert few.again(UNEVEN, PLAIN_RUN, PLAIN_RUN) == second != []
    assert few.again(UNEVEN, PLAIN_RUN, PLAIN_RUN) == []
    assert many.again(UNEVEN, PLAIN_RUN, PLAIN_RUN) != []


def test_rounds_follow_while_they_find_shorter_plans():
    """Until two in a row begin with the same plan, and so many come at most."""
    found, plans = search(0, rounds=[20]), [UNEVEN, stages("000111", "000111")]
    for number in range(1 + SETTINGS.more_rounds):
        assert found.again(plans[number % 2], PLAIN_RUN, PLAIN_RUN) != []
    assert found.again(stages("000000", "000000"), PLAIN_RUN, PLAIN_RUN) == []
    found = search(0, rounds=[20])
    for plan in (plans[0], plans[0], plans[1], plans[1]):
        assert found.again(plan, PLAIN_RUN, PLAIN_RUN) != []
    assert found.again(plans[1], PLAIN_RUN, PLAIN_RUN) == []


def test_a_round_chooses_how_plans_run():
    """Where shared state takes half the time, and split backwards a tenth less; where neither may
    be chosen, none is.
    """

    def quicker(found: Draft, limit: float) -> float:
        seconds = priced(found, math.inf) / (1 + found.sharded) * (1 - 0.1 * found.split)
        return seconds if seconds < limit else math.inf

    graph, runs = search(0, quicker, [200]).again(UNEVEN, PLAIN_RUN, RunOptions(True, True))[0]
    assert len(graph) == 1
    assert runs == RunOptions(True, True)
    assert search(0, quicker, [200]).again(UNEVEN, PLAIN_RUN, PLAIN_RUN)[0][1] == PLAIN_RUN


def test_a_search_knows_when_it_is_misled():
    """A plan that takes a fifth longer than it thinks; a twentieth is usual."""
    found, seconds = search(0), slowest(draft("000111", "000001"), math.inf)
    assert found.is_misled(UNEVEN, PLAIN_RUN, 1.2 * seconds)
    assert not found.is_misled(UNEVEN, PLAIN_RUN, 1.05 * seconds)
