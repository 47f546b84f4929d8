"""Dimensions of the samples, found by two sizes."""

import pytest
import torch

from anabranch.graph.call_traits import batch_dim


@pytest.mark.parametrize(
    ("small", "large", "dim"),
    [((4, 6), (8, 6), 0), ((3, 4), (3, 8), 1), ((4, 4), (4, 4), None), ((4, 4), (8, 4), 0)],
)
def test_batch_dim(small: tuple[int, ...], large: tuple[int, ...], dim: int | None) -> None:
    """The dimension that grows from 4 to 8 with the samples, even where another is 4 as well."""
    assert batch_dim(torch.empty(small), torch.empty(large), (4, 8)) == dim


@pytest.mark.parametrize(
    ("small", "large"), [((12, 6), (24, 6)), ((4, 4), (8, 8)), ((5, 6), (9, 6))]
)
def test_batch_dim_refuses(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    """Folded, in two dimensions, or one more than the samples."""
    with pytest.raises(ValueError, match="folded"):
        batch_dim(torch.empty(small), torch.empty(large), (4, 8))
