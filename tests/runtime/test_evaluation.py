"""Means over held-out batches."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.small import (
    batch,
    built,
    plan,
)
from tests.runtime.training import run

pytestmark = pytest.mark.dist


def test_evaluation_is_in_evaluation_mode() -> None:
    """Dropout does nothing and running means are used; batches of any size, weighted by samples."""
    for name in ("Dropout", "Norm"):
        model = built(name)
        held_out = [batch(16, 8), batch(7, 9)]
        chosen = plan(model, 2, replicas=[1, 2])
        results = run(model, chosen, lambda p, held=held_out: p.evaluate(held))
        model.module.eval()
        with torch.no_grad():
            losses = [model.module(**each).item() for each in held_out]
        model.module.train()
        expected = (16 * losses[0] + 7 * losses[1]) / 23
        assert [r["loss"] for r in results] == pytest.approx([expected] * 3, rel=1e-6)
