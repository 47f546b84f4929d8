"""The verb verify."""

from __future__ import annotations

import pytest

from tests.cli.examples import TOWERS


@pytest.mark.dist
def test_verify_is_bitwise(document):
    """The proof that a newcomer asks for first."""
    found = document("verify", TOWERS, "--devices", "2", "--batch-size", "8")
    assert found["bitwise"]
    assert found["max_gradient_error"] == 0
    assert found["loss"] == found["reference_loss"]
