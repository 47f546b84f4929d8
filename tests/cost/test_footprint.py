"""Bytes across borders."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost.footprint import Border, StagePasses, Traffic, pass_behind


def test_some_bytes_do_not_depend_on_the_samples():
    """10 per sample and 100 whatever they are."""
    assert Traffic(10, 100).at(3) == 130
    many = Traffic(np.array([10.0, 0.0]), np.array([0.0, 100.0]))
    assert many.at(3).tolist() == [30.0, 100.0]
    assert many[1:].at(3).tolist() == [100.0]


def test_gradients_go_against_their_values():
    """What comes in are values that enter and gradients of what leaves."""
    border = Border(Traffic(1, 0), Traffic(10, 0), Traffic(100, 0), Traffic(1000, 0))
    assert border.comes.at(1) == 101
    assert border.goes.at(1) == 1010


operators = st.lists(st.tuples(*(st.integers(0, 20),) * 4), max_size=6)
"""Bytes of a gradient, of a pass and kept per sample, and kept whatever the samples."""


def passes(rows: list[tuple[int, int, int, int]]) -> StagePasses:
    return StagePasses.of(*np.array(rows, dtype=float).reshape(-1, 4).T)


@given(operators, st.integers(0, 5))
def test_the_walk_over_a_backward(rows, samples):
    """From the last operator to the first: what is still kept, and what this one takes; at most,
    less all that was kept. One operator after the other comes to the same.
    """
    held = whole = sum(samples * kept + fixed for _, _, kept, fixed in rows)
    most, behind = 0, 0.0
    for gradient, working, kept, fixed in reversed(rows):
        most = max(most, held + gradient + samples * working - whole)
        held -= samples * kept + fixed
    for gradient, working, kept, fixed in rows:
        behind = pass_behind(behind, kept * samples + fixed, gradient + working * samples)
    assert passes(rows).at(samples) == behind == most
    assert passes(rows).at(np.array([[samples, 2]])).tolist() == [[most, passes(rows).at(2)]]


def test_a_table_lies_where_others_kept():
    """The gradient of an embedding, 100 bytes, is made when the 30 per sample of the layers behind
    it are given back: 2 samples leave 40 of it on top, 4 samples nothing but the pass of a layer.
    """
    model = passes([(100, 0, 0, 0), (5, 2, 15, 0), (5, 3, 15, 0)])
    assert (model.at(2), model.at(4)) == (40, 5 + 4 * 3)
