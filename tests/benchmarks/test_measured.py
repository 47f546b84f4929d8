"""The benchmark of measured steps: every contender trains, and equal plans are run once."""

import pytest

from anabranch.cluster import Cluster
from anabranch.profile.estimate import estimate
from benchmarks.measured import __main__ as measured


@pytest.mark.dist
def test_contenders_of_a_small_model_train(monkeypatch: pytest.MonkeyPatch):
    """On one rank all plans are one, which is run once beside one process."""
    monkeypatch.setattr(measured, "STEPS", 2)
    # Times of a data sheet are the same each time, and so are the plans.
    monkeypatch.setattr(
        measured,
        "measure_workload",
        lambda _, counts, captured: estimate(captured, "v100", counts),
    )
    monkeypatch.setattr(measured, "MODELS", {"small": ("two-branch", {})})
    row = measured.measured("small:4", Cluster.preset("local:1"), 1)
    assert (row["samples"], row["ranks"]) == (4, 1)
    assert [name for name, step_s in row["steps"].items() if step_s] == [
        "graph",
        "one process, 1 thread",
    ]
    assert measured._cell(row, "chain") == measured._cell(row, "data parallelism") == "as graph"
    assert "(" in measured._cell(row, "graph")
