"""Memory of replicas that hold whole mini-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.errors import (
    InfeasiblePlanError,
)
from anabranch.plans.plan import Plan, Prediction
from anabranch.runtime.asynchronous.requirements import round_robin_of
from anabranch.runtime.asynchronous.round_robin_memory import budgeted
from anabranch.weights import Stash
from tests.runtime.asynchronous.models import cut
from tests.runtime.asynchronous.running import (
    plan_of,
    refusal,
)

pytestmark = pytest.mark.dist


def test_memory_is_that_of_whole_minibatches() -> None:
    """The plan's own prediction is for halves of them; memory for the wholes is asked for first."""
    model = cut("chain 2")

    def expected(samples: int) -> Plan:
        chosen = plan_of(model, samples, replicas=(2, 1))
        known = replace(chosen, predicted=Prediction(1.0, 1.0, 0.0, (1, 1, 1)))
        rounds = round_robin_of(known)
        assert rounds is not None
        return budgeted(known, rounds, model.captured, Stash())

    peaks, twice = (expected(n).predicted.device_peak_bytes for n in (1 << 12, 1 << 13))
    assert peaks[0] == peaks[1] > peaks[2]
    # Of two mini-batches in flight: what enters the layer norm and what leaves tanh is one tensor,
    # which leaves the linear layer another; 6 numbers of 4 bytes for each of 4096 samples.
    assert twice[0] - peaks[0] > 2 * (1 << 12) * 6 * 4
    assert twice[0] < 2 * peaks[0]  # weights do not grow
    text = refusal(model, expected(1 << 40), InfeasiblePlanError)
    assert "by the plan's prediction" in text
