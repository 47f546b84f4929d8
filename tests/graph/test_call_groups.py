"""Groups of calls under merging: neighbours that may join, and sets that have to."""

import torch
from torch import nn

from anabranch.graph.call_groups import CallGroups, bind, components, convex
from anabranch.graph.call_traits import CallTraits
from anabranch.graph.capture import capture


class Diamond(nn.Module):
    """Calls 0 to 3 are a, b, c and their sum; then a mean.

    a --+--> b --+--> sum --> mean
        +--> c --+
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        return (self.b(a) + self.c(a)).mean()


def diamond() -> CallGroups:
    captured = capture(Diamond(), torch.randn(4, 5))
    groups = CallGroups(CallTraits(captured.programs.at(4), captured.programs.at(8)))
    groups.rank_ancestors()
    return groups


def test_neighbours_are_those_that_make_nobody_wait() -> None:
    """b's only reader is the sum; a is b's only input, but c reads it too, so the sum comes first.

    The sum has two inputs, neither of which needs the other: it may join its only reader alone.
    """
    groups = diamond()
    assert groups.neighbours(1) == [3, 0]
    assert groups.neighbours(3) == [4]


def test_merging_keeps_what_depends_on_what() -> None:
    """a and b as one: c still needs it, and so does the sum."""
    groups = diamond()
    groups.merge(0, 1)
    assert groups.members[0] == [0, 1]
    assert groups.order() == [0, 2, 3, 4]
    assert groups.needs(3, 0)
    assert groups.needs(2, 0)
    assert not groups.needs(2, 3)


def test_what_lies_between_bound_calls_joins_them() -> None:
    """a and the sum in one group: b and c lie on paths from it to itself."""
    groups = diamond()
    bind(groups, [[0, 3]])
    assert sorted(groups.members[0]) == [0, 1, 2, 3]
    assert list(groups.members) == [0, 4]


def test_convex_and_connected_sets() -> None:
    """b and c are apart; a and the sum are not convex, as b lies between them."""
    groups = diamond()
    assert sorted(map(sorted, components(groups, {1, 2, 4}))) == [[1], [2], [4]]
    assert convex(groups, {0, 1, 2, 3})
    assert not convex(groups, {0, 3})
