"""1F1B and kFkB: warm-up counts and orders, by eye."""

from dataclasses import replace

import pytest

from anabranch.errors import InvalidScheduleError
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.kfkb import KFKB


def stages_on_one_device_each(
    edges: tuple[tuple[int, int], ...],
    sizes: list[int],
    batch_size: int,
    k: list[int] | None = None,
) -> StageGraph:
    """Stage i on device i, with its own micro-batch size and k."""
    groups = k or [1] * len(sizes)
    stages = tuple(
        Stage((f"op{i}",), (i,), b, g) for i, (b, g) in enumerate(zip(sizes, groups, strict=True))
    )
    return StageGraph(stages, edges, batch_size)


def chain(length: int, num_microbatches: int) -> StageGraph:
    """0 -> 1 -> 2 ..."""
    edges = tuple((i, i + 1) for i in range(length - 1))
    return stages_on_one_device_each(edges, [1] * length, num_microbatches)


def counts(graph: StageGraph, rule: KFKB | None = None) -> list[int]:
    """What the rule lets every stage hold."""
    return [stage.in_flight for stage in (rule or KFKB()).warm_up(graph).stages]


def order(graph: StageGraph, device: int) -> list[str]:
    """The actions of one device as text."""
    return [str(action) for action in KFKB().order(KFKB().warm_up(graph)).actions[device]]


def test_chain_of_four():
    """The classic 1F1B order: stage s holds 4 - s micro-batches."""
    graph = chain(4, 5)
    assert order(graph, 0) == ["0F0", "0F1", "0F2", "0F3", "0B0", "0F4", "0B1", "0B2", "0B3", "0B4"]
    assert order(graph, 1) == ["1F0", "1F1", "1F2", "1B0", "1F3", "1B1", "1F4", "1B2", "1B3", "1B4"]
    assert order(graph, 2) == ["2F0", "2F1", "2B0", "2F2", "2B1", "2F3", "2B2", "2F4", "2B3", "2B4"]
    assert order(graph, 3) == ["3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3", "3F4", "3B4"]


def test_branches_count_by_distance_not_by_stages():
    """Two branches of 2 and 1 stages meet in a join: 4 stages, but depth 3.

    0 -> 1 -+
            +-> 3
         2 -+
    """
    graph = stages_on_one_device_each(((0, 1), (1, 3), (2, 3)), [1] * 4, 6)
    assert counts(graph) == [3, 2, 2, 1]
    assert order(graph, 2)[:5] == ["2F0", "2F1", "2B0", "2F2", "2B1"]


def test_no_stage_holds_more_than_there_is():
    """Fewer micro-batches than stages are no error."""
    assert counts(chain(4, 2)) == [2, 2, 2, 1]
    assert order(chain(4, 2), 0) == ["0F0", "0F1", "0B0", "0B1"]


def test_a_deep_warm_up_is_as_deep_as_there_is_room():
    """Not below the minimal one, and what follows a stage is held to its count."""
    graph, deep = chain(3, 8), KFKB(per_hop=2)
    assert counts(graph, deep) == [5, 3, 1]

    def within(*room: int) -> list[int]:
        return [stage.in_flight for stage in deep.warm_up(graph, room.__getitem__).stages]

    assert within(9, 9, 9) == [5, 3, 1]
    assert within(4, 9, 9) == [4, 3, 1]
    assert within(1, 9, 0) == [3, 3, 1]
    assert within(9, 1, 0) == [5, 2, 1]

    # Stage 0 waits for gradients of two samples with 8 in flight, stage 1 goes back by one: the
    # second comes when it has had one sample more than it holds.
    edges = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    halved = stages_on_one_device_each(edges, [2, 1, 1, 1, 1, 1], 16)
    held = deep.warm_up(halved, [4, 9, 9, 9, 9, 9].__getitem__)
    assert [stage.in_flight for stage in held.stages] == [4, 7, 7, 5, 3, 1]


def test_groups_of_two():
    """k = 2: the sink holds two and turns over two at a time; the last group may be short."""
    graph = stages_on_one_device_each((), [1], 5, k=[2])
    expected = ["0F0", "0F1", "0B0", "0B1", "0F2", "0F3", "0B2", "0B3", "0F4", "0B4"]
    assert order(graph, 0) == expected


def with_in_flight(graph: StageGraph, in_flight: list[int]) -> StageGraph:
    """Counts written by hand."""
    pairs = zip(graph.stages, in_flight, strict=True)
    return replace(graph, stages=tuple(replace(s, in_flight=n) for s, n in pairs))


def test_a_rising_warm_up_is_refused():
    """Stage 1 would wait for a second forward of stage 0, which waits for stage 1's backward."""
    with pytest.raises(InvalidScheduleError, match=r"rises along stage edge 0 -> 1.*at least 2"):
        KFKB().order(with_in_flight(chain(2, 4), [1, 2]))


def test_undecided_counts_are_refused():
    """The graph of a planner has none yet."""
    with pytest.raises(InvalidScheduleError, match=r"in_flight of stage 0 is 0.*leave in_fl"):
        KFKB().order(chain(2, 4))


def test_a_count_below_k_is_refused():
    """Two backwards in a row need two micro-batches."""
    graph = stages_on_one_device_each((), [1], 4, k=[2])
    with pytest.raises(InvalidScheduleError, match="at least 2"):
        KFKB().order(with_in_flight(graph, [1]))
