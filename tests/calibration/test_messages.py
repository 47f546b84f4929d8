"""Which pairs of ranks exchange messages, and the line through their seconds."""

from __future__ import annotations

import pytest

from anabranch.calibration.messages import Line, line, pairs


def test_a_line_has_the_smallest_size_on_it():
    """1 s for 10 bytes and 10 s for 100: 0.1 s per byte and nothing besides."""
    assert line([10, 100], [1.0, 10.0]) == Line(0.0, pytest.approx(0.1))
    assert line([10, 100], [2.0, 1.0]) == Line(2.0, 0.0)


def test_pairs_are_sampled_by_kind():
    """Few ranks are measured in all pairs, many in some of each kind."""
    assert pairs(["a", "a", "a"]) == [(0, 1), (0, 2), (1, 2)]
    assert pairs(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    hosts = ["a"] * 20 + ["b"] * 20
    chosen = pairs(hosts, most=12)
    near = [(a, b) for a, b in chosen if hosts[a] == hosts[b]]
    assert 8 <= len(near) <= 12
    assert 8 <= len(chosen) - len(near) <= 12
