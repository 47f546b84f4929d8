"""The verb profile: measured, estimated, and files of other projects in our format."""

from __future__ import annotations

import json

from tests.cli.examples import TOWERS


def test_profile_measures_and_writes(document, tmp_path):
    """The contract's fields, and a file that planning can start from."""
    path = tmp_path / "p.json"
    found = document("profile", TOWERS, "--samples", "1,2,4", "-o", str(path))
    assert found["source"] == "measured"
    assert found["samples"] == [1, 2, 4]
    assert found["parameter_bytes"] == 4 * (2 * (8 * 16 + 16 + 16 * 16 + 16) + 32 + 1)
    assert found["operators"] >= 5
    assert found["forward_s"] > 0
    assert found["backward_s"] > 0
    assert json.loads(path.read_text())["schema"] == "anabranch.profile/1"
