"""A workload is measured as it is trained."""

from __future__ import annotations

from anabranch import measure_workload
from tests.runtime.small import batch, built, with_options


def test_all_that_a_step_takes_is_measured() -> None:
    """Operators, its own optimizer's updates, and batches where it has data."""
    model = built("TwoBranch")
    workload = with_options(model, data=lambda size, epoch: [dict(batch(size, 0))] * 2)
    profile = measure_workload(workload, (2, 4), captured=model.captured, repeats=0)
    assert profile.samples == (2, 4)
    assert profile.update is not None
    assert profile.update.seconds(4, 1000) > 0
    assert profile.read_sample_s > 0
    without = with_options(model, data=None)
    assert measure_workload(without, (2, 4), repeats=0).read_sample_s == 0
