"""What a rank does besides computing, told apart."""

from __future__ import annotations

import pytest
import torch

from anabranch.calibration import overheads
from anabranch.calibration.overheads import (
    _LAYERS,
    _MORE_LAYERS,
    _VALUES,
    Overheads,
    _Alone,
    _Found,
    _Layer,
)
from anabranch.calibration.restarts import Restarts


def test_values_are_told_from_messages_and_passes(monkeypatch: pytest.MonkeyPatch):
    """A message takes 2 s at its sender and 3 s at its receiver, and half a second at both for each
    value; a pass takes 4 s, whether or not something goes to another rank, and a step 6 s, and
    .25 more for each tensor of its batch besides the first. Behind 30 s of computing instead of 1
    a message takes 3 s longer at one end and 5 s at the other.
    """
    alone = _Alone(0.0, 0.0, 100.0, Restarts(((1.0, 0.5),), 0.25))

    def found(values: int, layers: int = _LAYERS, **options: object) -> _Found:
        if layers == _MORE_LAYERS:
            return _Found(2.5 + 3.0, 3.5 + 5.0, 30.0, 8.0, 6.0, 1.0, alone)
        batch_s = 1.0 + (values - 1) / 4
        return _Found(2.0 + values / 2, 3.0 + values / 2, 1.0, 8.0, 6.0, batch_s, alone)

    monkeypatch.setattr(overheads, "_found", found)
    cold = ((1.0, 0.0), (30.0, 4.0))
    expected = Overheads(2.0, 3.0, 4.0, 6.0, 100.0, alone.restarts, 0.5, 0.25, cold)
    assert overheads.measure_overheads() == expected


def test_values_lie_in_memory_as_those_of_most_models():
    """Parts of a larger tensor would be copied slowly when they are sent."""
    given = _Layer()(tuple(torch.randn(4, 256 // _VALUES) for _ in range(_VALUES)))
    assert [value.shape for value in given] == [(4, 256 // _VALUES)] * _VALUES
    assert all(value.is_contiguous() for value in given)
