"""Bytes across borders."""

from __future__ import annotations

import numpy as np

from anabranch.cost.stage_weights import Border, Traffic


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
