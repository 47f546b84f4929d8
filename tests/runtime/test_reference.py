"""One process that the pipeline is compared with."""

from __future__ import annotations

from tests.runtime.small import slices


def test_slices_of_the_reference_tile_the_batch() -> None:
    assert slices(10, 4) == [(0, 4), (4, 8), (8, 10)]
