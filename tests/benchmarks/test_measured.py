"""The benchmark of measured steps: every contender trains, and equal plans are run once."""

import pytest

from anabranch.cluster import Cluster
from benchmarks.measured import __main__ as measured


@pytest.mark.dist
def test_contenders_of_a_small_model_train(monkeypatch: pytest.MonkeyPatch):
    """On one rank all plans are one, which is run once beside one process."""
    monkeypatch.setattr(measured, "STEPS", 2)
    monkeypatch.setattr(measured, "MODELS", {"small": ("two-branch", {})})
    for ranks in (1, 2):
        row = measured.measured("small:4", Cluster.preset(f"local:{ranks}"), 1)
        steps, shapes = row["steps"], row["shape"]
        assert (row["samples"], row["ranks"]) == (4, ranks)
        assert [name for name in steps if name.startswith("one process")] == [
            *["one process, 1 thread", "one process, 2 threads"][:ranks]
        ]
        for name, step_s in steps.items():
            assert (step_s is None) == shapes[name].startswith("as "), name
            assert measured._cell(row, name)
        if ranks == 1:
            assert [name for name, step_s in steps.items() if step_s] == [
                "graph",
                "one process, 1 thread",
            ]
