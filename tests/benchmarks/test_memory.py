"""The table of shared optimizer state."""

from __future__ import annotations

from benchmarks.memory.sharded import show


def test_state_and_steps_are_told_without_and_with_sharing():
    """Of 8 bytes two ranks keep 6 and 2; a step takes half as long, one in a row a quarter more;
    the same way twice differs by 2 %.
    """
    row = {
        "model": "small",
        "ranks": 2,
        "taken": True,
        "state_bytes": [[8, 8], [6, 2]],
        "predicted_s": [0.004, 0.003],
        "step_s": [0.004, 0.002],
        "row_s": [0.004, 0.005],
        "apart": 0.02,
    }
    told = show([row]).splitlines()[-1]
    assert [cell.strip() for cell in told.strip("|").split("|")] == [
        "small",
        "2",
        "0.750, 0.250",
        "yes",
        "4.0, 3.0 (0.750)",
        "4.0, 2.0 (0.500)",
        "4.0, 5.0 (1.250)",
        "2.0%",
    ]
