"""What ranks do besides computing, told from steps."""

import pytest

from anabranch.calibration import pipelines
from anabranch.calibration.pipelines import _FEW, _Steps, measure_overheads
from anabranch.workload import Workload


def test_steps_tell_messages_from_passes(monkeypatch: pytest.MonkeyPatch):
    """A pass takes 3 s, a step 7 s, a message 2 s at each end; an all-reduce
    an eighth of a second per byte.
    """

    def steps(workload: Workload, ranks: int, replicas: int = 1) -> _Steps:
        nbytes = sum(p.nbytes for p in workload.module.parameters())
        microbatch_s = 6.0 if ranks == replicas else 10.0
        totals_s = 4.0 * (ranks > 1)
        all_reduce_s = (4.0 + nbytes / 8) * (replicas > 1)
        return _Steps(7.0 + totals_s + all_reduce_s + _FEW * microbatch_s, microbatch_s)

    monkeypatch.setattr(pipelines, "_steps", steps)
    assert measure_overheads() == (2.0, 3.0, 7.0, 0.125)
