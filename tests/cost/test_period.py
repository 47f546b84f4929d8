"""The period of a stage by hand."""

from __future__ import annotations

import numpy as np

from anabranch.cost.period import period_s, traffic_s, work_s
from anabranch.cost.stage_weights import Traffic


def test_the_larger_direction_counts():
    """3 samples at half a second per byte: 30 bytes come in, 12 + 20 go out."""
    assert traffic_s(Traffic(10, 0), Traffic(4, 0), 3, 0.5) == 15
    assert traffic_s(Traffic(10, 0), Traffic(4, 20), 3, 0.5) == 16


def test_compute_hides_transfers():
    """Whichever is more."""
    assert work_s(9.0, 6.0) == 9.0
    assert work_s(9.0, 16.0) == 16.0


def test_the_all_reduce_is_spread_over_the_micro_batches():
    """40 s once per step of 8, of which a backward of 6 s hides as much."""
    assert period_s(16.0, 9.0, 46.0, 8) == 21.0
    assert period_s(16.0, 9.0, 5.0, 8) == 16.0


def test_many_stages_at_once():
    """Arrays have the numbers of the stages one by one."""
    comes = Traffic(np.array([10.0, 1.0]), np.array([0.0, 0.0]))
    goes = Traffic(np.array([4.0, 4.0]), np.array([0.0, 20.0]))
    traffic = traffic_s(comes, goes, 3, 0.5)
    assert traffic.tolist() == [15.0, 16.0]
    compute = np.array([9.0, 18.0])
    assert period_s(work_s(compute, traffic), compute, 46.0, 8).tolist() == [20.0, 22.25]
