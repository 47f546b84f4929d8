"""What profiles say of kept bytes."""

import pytest

from anabranch.graph.opgraph import Op, OpGraph
from anabranch.profile.profile import OpCost, Profile, bytes_per_sample, fixed_bytes


def test_bytes_per_sample() -> None:
    """The slope between two counts, rounded up; what does not grow drops out."""
    assert bytes_per_sample([100, 50, 7], [200, 50, 10], (2, 4)) == [50, 0, 2]
    assert bytes_per_sample([9], [9], (2, 2)) == [5]


def test_fixed_bytes() -> None:
    """What is left of the bytes at the smaller count; rounding of the slope makes none of it."""
    assert fixed_bytes([100, 50, 7], [50, 0, 2], 2) == [0, 50, 3]
    assert fixed_bytes([9], [5], 2) == [0]


def profile_of(*costs: OpCost) -> Profile:
    graph = OpGraph(tuple(Op(f"op{i}") for i in range(len(costs))), ())
    return Profile(graph, (1, 2), costs, device="cpu", source="measured")


def test_half_of_a_backward_is_taken_where_nothing_is_known() -> None:
    """Old profiles, and published ones."""
    known = OpCost((1.0, 2.0), (2.0, 4.0), 0, weight_s=(0.5, 1.5))
    profile = profile_of(known, OpCost((1.0, 2.0), (2.0, 4.0), 0))
    assert profile.weight_seconds.tolist() == [[0.5, 1.5], [1.0, 2.0]]


def test_gradients_of_weights_are_scaled_with_their_backwards() -> None:
    """And stay unknown where they were."""
    known = OpCost((1.0, 2.0), (2.0, 4.0), 0, weight_s=(0.5, 1.5))
    scaled = profile_of(known, OpCost((1.0, 2.0), (2.0, 4.0), 0)).scaled([[[2.0]], [[3.0]]])
    assert scaled.costs[0] == OpCost((2.0, 4.0), (6.0, 12.0), 0, weight_s=(1.5, 4.5))
    assert scaled.costs[1].weight_s == ()
    assert profile_of(known, known).scaled(2.0).costs[0].weight_s == (1.0, 3.0)


@pytest.mark.parametrize(
    ("weight_s", "message"),
    [
        ((0.5,), "op0 has 1 times of gradients of weights"),
        ((0.5, 4.5), "gradients of weights of operator op0 take 4.5 s of the 4.0 s"),
        ((0.5, -1.0), "take -1.0 s of the 4.0 s"),
    ],
)
def test_impossible_gradients_of_weights_are_refused(
    weight_s: tuple[float, ...], message: str
) -> None:
    """A part of the backward, at every sample count."""
    with pytest.raises(ValueError, match=message):
        profile_of(OpCost((1.0, 2.0), (2.0, 4.0), 0, weight_s=weight_s))
