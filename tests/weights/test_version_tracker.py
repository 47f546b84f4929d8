"""How many copies of the weights are alive, what order of passes is accepted, and the tables of
what passes read.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.weights import (
    POLICIES,
    Naive,
    PipeOptim,
    Reading,
    Stash,
    TwoBuffers,
    Unit,
    VersionTracker,
    versions_held,
)
from tests.weights.drawing import draw
from tests.weights.test_policies import CHAIN, TWO_BRANCHES, graph_of

DOCS = Path(__file__).parents[2] / "docs" / "policies"

# Copies per stage of a pipeline of depth four, from distance 3 to 0 (PipeOptim, Table II: up to D
# for the PipeDream policies, 2 for 2BW and SpecTrain, 1 to 2 for PipeOptim).
HELD = {
    "naive": [1, 1, 1, 1],
    "stash": [4, 3, 2, 1],
    "vertical-sync": [4, 4, 4, 4],
    "2bw": [2, 2, 2, 2],
    "spectrain": [2, 2, 2, 2],
    "pipeoptim": [2, 2, 2, 1],
    "predict-stash": [5, 4, 3, 1],
    # Those of stash and 2bw, two for moments and basis, and one for the last update.
    "asyncpp": [4, 3, 2, 1],
    "basis-rotation": [6, 5, 4, 3],
    "2bw-ef": [3, 3, 3, 3],
}


def held(name: str, distance: int, depth: int, *, last_update: bool = False) -> int:
    policy = POLICIES[name]()
    return versions_held(
        policy,
        in_flight=distance + 1,
        deepest=depth,
        microbatches=depth if policy.microbatches else 1,
        last_update=last_update,
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_table_2(name):
    """At depth four, by eye."""
    assert [held(name, distance, 4) for distance in (3, 2, 1, 0)] == HELD[name]


@given(st.integers(1, 9))
def test_table_2_at_any_depth(depth):
    """Stashing grows with the depth at the first stage, 2BW and PipeOptim never exceed two."""
    first = depth - 1
    assert held("stash", first, depth) == depth
    assert held("vertical-sync", 0, depth) == depth
    assert held("2bw", first, depth) == 2
    assert held("pipeoptim", first, depth) == min(2, depth)
    assert held("pipeoptim", 0, depth) == 1


def test_an_optimizer_without_a_rule_keeps_its_last_update():
    """One copy more where there are predictions, none elsewhere."""
    assert held("pipeoptim", 2, 4, last_update=True) == 3
    assert held("pipeoptim", 0, 4, last_update=True) == 1
    assert held("stash", 2, 4, last_update=True) == 3


def test_many_microbatches_make_two_versions_enough():
    """2BW holds two versions however many of its micro-batches are in flight, up to a mini-batch's
    worth.
    """
    for microbatches in (4, 5, 8):
        assert versions_held(TwoBuffers(), in_flight=4, deepest=2, microbatches=microbatches) == 2


def test_what_is_alive_step_by_step():
    """Stashing with three in flight: a version stays until its last reader is learned."""
    alive = VersionTracker(Stash(), in_flight=3, deepest=3)
    seen = []
    for forward in (0, 1, 2, 3, 4):
        alive.forward(forward)
        if forward >= 2:
            alive.backward(forward - 2)
            alive.finish()
            seen.append(sorted(alive.versions))
    # F0 F1 F2 read version 0, F3 reads 1, F4 reads 2.
    assert seen == [[0, 1], [0, 1, 2], [1, 2, 3]]


def test_passes_out_of_order_are_refused():
    """A forward before its time, a second backward, a fill of a pipeline that is not empty."""
    alive = VersionTracker(PipeOptim(), in_flight=2, deepest=2)
    with pytest.raises(AssertionError, match="mini-batch 1 at version 0, with 0 in flight"):
        alive.forward(1)
    with pytest.raises(AssertionError, match="mini-batch 0"):
        alive.backward(0)
    alive.forward(0)
    alive.forward(1)
    with pytest.raises(AssertionError, match="mini-batch 2 at version 0, with 2 in flight"):
        alive.forward(2)
    with pytest.raises(AssertionError, match="when it has been drained"):
        alive.fill(0)
    with pytest.raises(AssertionError, match="mini-batch 1"):
        alive.backward(1)


def test_a_backward_reads_no_version_that_nothing_keeps():
    """One between those of its forward and of the present would silently be the present one."""

    class Halfway(Naive):
        def backward(self, unit: Unit) -> Reading:
            return Reading(unit.number - 1)

    with pytest.raises(AssertionError, match="no version is kept for Reading"):
        versions_held(Halfway(), in_flight=3, deepest=3)


def test_no_stage_has_more_in_flight_than_the_deepest():
    """Such a count is a mistake of the caller."""
    with pytest.raises(AssertionError, match=r"4 in flight, at the deepest source 3"):
        VersionTracker(Naive(), in_flight=4, deepest=3)


@pytest.mark.parametrize("edges", [CHAIN, TWO_BRANCHES])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_pages_show_what_is_read(name, edges):
    """Both tables of every page."""
    policy = POLICIES[name]()
    microbatches = 4 if policy.microbatches else 1
    table = draw(policy, graph_of(edges, 28), 7, microbatches=microbatches)
    assert f"```text\n{table}\n```" in (DOCS / f"{name}.md").read_text()


def test_every_policy_has_a_row_and_a_page():
    """In the order of the table of policies."""
    index = (DOCS / "index.md").read_text()
    rows = [index.index(f"| [`{name}`]({name}.md) |") for name in POLICIES]
    assert rows == sorted(rows)
    assert {page.stem for page in DOCS.glob("*.md")} == {"index", *POLICIES}
