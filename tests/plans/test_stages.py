"""Stage graphs: heights, intervals, and what they refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.plans.plan import Plan, Prediction, memory_text
from anabranch.plans.stages import Stage, StageGraph, heights, slice_sizes


def test_the_height_of_a_stage_is_its_longest_distance_to_a_sink():
    """Stage 0 leads to a sink, and to a stage before one."""
    assert heights(4, [(0, 1), (0, 2), (2, 3)]) == [2, 0, 1, 0]


def test_slices_without_a_sample_are_left_out():
    """Five samples in micro-batches of four on two replicas: the last one has one sample."""
    graph = StageGraph((Stage(("a",), (0, 1), 4),), (), 5)
    assert graph.slices(0) == [(0, 2), (2, 4), (4, 5)]


def test_ranks_are_the_places_of_the_devices():
    """A plan may leave devices of the cluster out; ranks have no gaps."""
    graph = StageGraph((Stage(("a",), (9, 3), 4), Stage(("b",), (5,), 4)), ((0, 1),), 8)
    assert graph.rank_of == {3: 0, 5: 1, 9: 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (0,), 4), "at least one operator"),
        ((("a",), (), 4), "needs devices"),
        ((("a",), (1, 1), 4), "each once"),
        ((("a",), (1,), 0), "micro-batch size 0"),
    ],
)
def test_a_broken_stage_cannot_exist(arguments, message):
    """Checked once, so that nothing downstream has to."""
    with pytest.raises(ValueError, match=message):
        Stage(*arguments)


@pytest.mark.parametrize("edges", [((1, 0),), ((0, 5),), ((0, 0),), ((0, 1), (0, 1))])
def test_stage_edges_run_upwards_and_occur_once(edges):
    """That makes every stage graph acyclic."""
    stages = (Stage(("a",), (0,), 1), Stage(("b",), (1,), 1))
    with pytest.raises(ValueError, match="edge"):
        StageGraph(stages, edges, 4)


def test_a_summary_names_what_some_stage_has():
    """k and recompute get a column where any stage has them, else none."""

    def lines(*stages: Stage) -> list[str]:
        graph = StageGraph(stages, tuple((i, i + 1) for i in range(len(stages) - 1)), 8)
        predicted = Prediction(2.0, 0.1, 0.25, (2**20,) * len(graph.devices))
        made = Plan(graph, "1f1b", "p", "m", "c", "measured", 0.0, 0.0, predicted)
        return made.summary().splitlines()[2:-1]

    plain = lines(Stage(("a",), (0,), 4), Stage(("b",), (1,), 4))
    assert " ".join(plain[1].split()) == (
        "stage 1 after 0 devices 1 micro-batch 4 in flight 0 1 operator: b"
    )
    first, last = lines(Stage(("a",), (0, 1), 4, k=2, recompute=True), Stage(("b",), (2,), 4))
    assert "in flight   0  k  2  recompute    1 operator: a" in first
    assert "in flight   0  k  1               1 operator: b" in last
    # Groups of two need two micro-batches.
    assert "k " not in lines(Stage(("a",), (0,), 8, k=2))[0].partition("in flight")[2]


def test_a_summary_of_many_stages_has_a_line_for_those_alike():
    """Two branches of seven stages and a join: first stages, others, and the one on two devices."""
    stages = [Stage((f"{s}.in", f"{s}.mid", f"{s}.out"), (s,), 4, in_flight=2) for s in range(14)]
    join = Stage(("join",), (14, 15), 8, in_flight=1)
    edges = [(s, s + 1) for s in range(13) if s != 6] + [(6, 14), (13, 14)]
    graph = StageGraph((*stages, join), tuple(sorted(edges)), 8)
    made = Plan(graph, "1f1b", "p", "m", "c", "measured", 0.0, 0.0, None)
    assert made.summary().splitlines()[2:-1] == [
        "  stages 0,7, after -, 1 device each, micro-batch 4, in flight 2, 3 operators each: "
        "0.in .. 0.out, ...",
        "  stages 1-6,8-13, after 0, ..., 1 device each, micro-batch 4, in flight 2, 3 operators "
        "each: 1.in .. 1.out, ...",
        "  stage 14, after 6, 13, 2 devices, micro-batch 8, in flight 1, 1 operator: join",
    ]


def test_the_headline_chooses_its_units():
    """Few samples per second keep their digits; half a GiB and less is in MiB; no time, no rate."""
    assert Prediction(2.0, 0.0, 0.25, (2**30,)).text(8) == (
        "step 2000.00 ms, 4 samples/s, bubble 25.0%, peak 1.00 GiB"
    )
    said = Prediction(12.0, 0.0, 0.0, (2**21,)).text(8).split(", ")
    assert said[1::2] == ["0.667 samples/s", "peak 2.0 MiB"]
    assert Prediction(0.0, 0.0, 0.0, (0,)).text(8).startswith("step 0.00 ms, 0 samples/s")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 MiB"),
        (9, "9 B"),
        (300, "0.3 KiB"),
        (2**14, "16.0 KiB"),
        (2**21, "2.0 MiB"),
        (2**31, "2.00 GiB"),
    ],
)
def test_memory_is_told_in_a_unit_that_shows_something(nbytes, text):
    """Small weights are not nothing."""
    assert memory_text(nbytes) == text


def test_a_summary_says_that_the_optimizer_is_sharded_where_it_is():
    """A plan that is allowed to shard its state has none to shard where no stage has replicas."""

    def summary(*stages: Stage) -> str:
        graph = StageGraph(stages, (), 8)
        return Plan(
            graph, "1f1b", "p", "m", "c", "", 0.0, 0.0, None, shard_optimizer=True
        ).summary()

    said = "a shard of the optimizer's state"
    assert said in summary(Stage(("a",), (0, 1), 4), Stage(("b",), (2,), 4))
    assert said not in summary(Stage(("a",), (0,), 4), Stage(("b",), (1,), 4))


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 6))
def test_the_ends_of_all_slices(batch_size, microbatch_size, replicas):
    """The fewest and most samples of any slice, the short last micro-batch included."""
    size = min(microbatch_size, batch_size)
    graph = StageGraph((Stage(("op",), tuple(range(replicas)), size),), (), batch_size)
    slices = {
        stop - start
        for i in range(graph.num_microbatches(0))
        for start, stop in (graph.slice(0, i, r) for r in range(replicas))
    } - {0}
    found = {*slice_sizes(size, replicas)}
    if batch_size % size:
        found |= {*slice_sizes(batch_size % size, replicas)}
    assert found == slices == graph.slice_sizes(0)
