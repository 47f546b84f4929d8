"""Messages, agreement and updates by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.cluster import Cluster
from anabranch.cost.overheads import (
    agreement_of,
    message_s,
    sum_s,
    update_cost,
)
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.profile import UpdateCost
from tests.calibration.examples import calibration, cluster
from tests.simulator.helpers import chain, cost_model

PLAIN = Cluster.preset("local:2")


def test_a_message_takes_both_processors():
    """Of 8 bytes: 1 + 8 / 4 s at the sender, 2 + 8 / 2 s at the receiver; nothing for no bytes, or
    where nothing was measured.
    """
    assert message_s(calibration(), 8) == (3.0, 6.0)
    assert message_s(calibration(), 0) == (0.0, 0.0)
    assert message_s(None, 8) == (0.0, 0.0)


def test_sums_by_number_bytes_and_ranks():
    """4 gradients of 8 bytes in all over 3 ranks: 4 / 4 s, and 8 / 8 s for each of two others; per
    bucket a message to each of these (1.25 s) and from them (2.5 s).
    """
    assert sum_s(calibration(), 4, 8, 3, buckets=0) == 3.0
    assert sum_s(calibration(), 4, 8, 3, buckets=2) == 3.0 + 2 * 2 * (1.25 + 2.5)
    assert sum_s(calibration(), 4, 8, 1) == 0.0
    assert sum_s(None, 4, 8, 3) == 0.0


def test_everybody_tells_everybody():
    """Of 4 ranks each sends three messages (1.25 s) and takes three (2.5 s), after a latency."""
    assert agreement_of(cluster(4), 4) == (3 * 1.25, 8, 3 * 2.5)
    assert agreement_of(cluster(4, value_s=0.5), 4) == (3 * 1.75, 8, 3 * 3.0)
    assert agreement_of(cluster(4), 1) == (0, 0, 0)
    assert agreement_of(PLAIN, 2) == (0, 0, 0)


def test_a_measured_update_goes_first():
    """Then the data sheet, then the bandwidth of the calibration, then nothing is known."""
    measured = UpdateCost(1.0, 0.5, 0.25)
    profile = cost_model(chain(1), [1.0], [1.0], PLAIN).profile
    assert update_cost(replace(profile, update=measured), cluster(), 2.0) == measured
    # Adam: weight, gradient and two moments are read, all but the gradient written: 7 passes.
    assert update_cost(profile, cluster(), 2.0).byte_s == 0.07
    assert update_cost(profile, PLAIN, 2.0) == UpdateCost(0.0, 0.0, 0.0)
    estimated = replace(profile, source="estimated", device="v100")
    found = update_cost(estimated, cluster(), 2.0)
    assert found.byte_s == 7 / DATA_SHEETS["v100"].effective_bandwidth


def test_an_update_by_number_and_bytes():
    """1 s, half of one for each of 4 tensors, a quarter for each of 8 bytes; none for none."""
    assert UpdateCost(1.0, 0.5, 0.25).seconds(4, 8) == 5.0
    assert UpdateCost(1.0, 0.5, 0.25).seconds(0, 0) == 0.0
    with pytest.raises(ValueError, match="an update has a time of -1"):
        UpdateCost(-1.0, 0.0, 0.0)
