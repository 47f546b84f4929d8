"""Messages, agreement and updates by hand."""

from dataclasses import replace

import pytest

from anabranch.cluster import Cluster
from anabranch.cost.overheads import (
    UNCALIBRATED,
    agreement_s,
    all_gather_work_s,
    all_reduce_work_s,
    update_cost,
)
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.profile import UpdateCost
from tests.calibration.examples import calibration, cluster
from tests.simulator.helpers import chain, cost_model

PLAIN = Cluster.preset("local:2")


def test_all_reduces_by_bytes_and_ranks():
    """8 bytes over 3 ranks: 8 / 8 s for each of two others, and per bucket a message of 2 s to and
    from each. Ranks that share the optimizer's state add two thirds of a term each.
    """
    assert all_reduce_work_s(calibration(), 8, 3, buckets=0) == 2.0
    assert all_reduce_work_s(calibration(), 8, 3, buckets=2) == 2.0 + 2 * 2 * 4.0
    assert all_reduce_work_s(calibration(), 12, 3, buckets=0, shares=True) == 1.0
    assert all_reduce_work_s(calibration(), 8, 1, buckets=1) == 0.0
    assert all_reduce_work_s(UNCALIBRATED, 8, 3, buckets=1) == 0.0


def test_all_gathers_are_messages():
    """Of 3 ranks each has a message of 2 s to and from both others, for each bucket."""
    assert all_gather_work_s(calibration(), 3, buckets=1) == 2 * 4.0
    assert all_gather_work_s(calibration(), 3, buckets=2) == 2 * 2 * 4.0
    assert all_gather_work_s(calibration(), 1, buckets=1) == 0.0


def test_everybody_tells_everybody():
    """Of 4 ranks each sends three messages (2 s), and takes three after a latency."""
    assert agreement_s(cluster(4), 4) == (3 * 2.0, 8)
    assert agreement_s(cluster(4), 1) == (0, 0)
    assert agreement_s(PLAIN, 2) == (0, 0)


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
