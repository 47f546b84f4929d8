"""Slices of parameters know their whole by their names."""

import pytest
import torch

from anabranch.graph.slices import (
    Slice,
    in_slices,
    read_by_name,
    slice_named,
    view_named,
    whole_name,
)


def test_a_name_says_of_what_and_where() -> None:
    """The name is all that a checkpoint of another plan has to go by."""
    part = Slice("top.weight", 1, 4, 6)
    assert part.name == "top.weight[1:4:6]"
    assert slice_named(part.name) == part
    assert slice_named("top.weight") is None
    assert whole_name("top.weight[1:4:6][0:0:2]") == "top.weight"


def test_a_slice_of_a_slice_counts_from_where_that_begins() -> None:
    """A rewrite may cut what another one has cut."""
    whole = torch.arange(24).reshape(4, 6)
    assert view_named("w[1:2:6][0:1:3]", whole).tolist() == [[8, 9, 10, 11], [14, 15, 16, 17]]


def test_slices_stand_in_the_place_of_their_whole() -> None:
    """Optimizers and checks go through parameters in the model's order."""
    wholes = {"a": torch.zeros(2), "b": torch.arange(4), "c": torch.ones(1)}
    parts = in_slices(wholes, ["c", "b[0:2:4]", "b[0:0:2]", "a"], view_named)
    assert list(parts) == ["a", "b[0:0:2]", "b[0:2:4]", "c"]
    assert parts["b[0:2:4]"].tolist() == [2, 3]


@pytest.mark.parametrize(
    "stored",
    [
        ["w"],
        ["w[1:0:2]", "w[1:2:6]"],
        ["w[0:0:3]", "w[0:3:4]"],
        ["w[1:0:2]", "w[1:2:6][0:0:1]", "w[1:2:6][0:1:4]"],
    ],
)
@pytest.mark.parametrize("wanted", ["w", "w[1:1:5]", "w[0:2:4]", "w[1:2:6][0:1:3]"])
def test_what_is_stored_in_any_slices_is_read_in_any_others(stored: list[str], wanted: str) -> None:
    """A run resumes with a rewrite, without, or with another one."""
    whole = torch.arange(24).reshape(4, 6)
    tensors = {name: view_named(name, whole) for name in stored}
    result = read_by_name(wanted, tensors, tensors.__getitem__)
    assert result.equal(view_named(wanted, whole))


def test_a_missing_slice_is_refused() -> None:
    """Memory that was never filled must not become weights."""
    parts = {"w[0:0:1]": torch.ones(1, 2), "w[0:2:4]": torch.ones(2, 2)}
    with pytest.raises(ValueError, match="slices of w are missing"):
        read_by_name("w", parts, parts.__getitem__)


def test_a_number_is_the_same_in_each_slice() -> None:
    """Adam counts steps per parameter."""
    steps = {"w[0:0:1]": torch.tensor(3.0), "w[0:1:2]": torch.tensor(3.0)}
    assert read_by_name("w[1:0:1]", steps, steps.__getitem__) == 3
