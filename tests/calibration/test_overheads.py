"""What a rank does besides computing, told apart."""

from __future__ import annotations

import pytest
import torch

from anabranch.calibration import overheads
from anabranch.calibration.overheads import (
    _VALUES,
    Overheads,
    _Alone,
    _Found,
    _Layer,
)


def test_values_are_told_from_messages_and_passes(monkeypatch: pytest.MonkeyPatch):
    """A message takes 2 s at its sender and 3 s at its receiver, and half a second at both for each
    value; a pass takes 4 s, whether or not something goes to another rank, and a step 6 s, and
    .25 more for each tensor of its batch besides the first.
    """
    alone = _Alone(0.0, 0.0, 100.0)

    def found(values: int) -> _Found:
        batch_s = 1.0 + (values - 1) / 4
        return _Found(2.0 + values / 2, 3.0 + values / 2, 8.0, 6.0, batch_s, alone)

    monkeypatch.setattr(overheads, "_found", found)
    expected = Overheads(2.0, 3.0, 4.0, 6.0, 100.0, 0.5, 0.25)
    assert overheads.measure_overheads() == expected


def test_values_lie_in_memory_as_those_of_most_models():
    """Parts of a larger tensor would be copied slowly when they are sent."""
    given = _Layer()(tuple(torch.randn(4, 256 // _VALUES) for _ in range(_VALUES)))
    assert [value.shape for value in given] == [(4, 256 // _VALUES)] * _VALUES
    assert all(value.is_contiguous() for value in given)
