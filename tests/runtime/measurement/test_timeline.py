"""A measured timeline."""

from typing import Any

import pytest

from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import built, plan
from tests.runtime.training import BATCHES, run

pytestmark = pytest.mark.dist


def test_a_recorded_step_is_a_timeline_of_all_ranks() -> None:
    """Each rank has the whole of it: forwards and backwards of all devices, and the messages."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> Any:
        pipeline.step(BATCHES[0])
        assert pipeline.timeline is None
        pipeline.step(BATCHES[1], record=True)
        return pipeline.timeline

    first, second = run(model, plan(model, 2), work)
    assert first == second
    assert first.source == "measured"
    compute = [str(s.action) for s in first.spans if s.action.kind.is_compute and s.device == 1]
    assert compute == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    assert 0 < max(first.busy_s.values()) < first.makespan_s <= first.step_s
