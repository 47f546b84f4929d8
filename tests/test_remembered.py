"""Results are made once per object and arguments."""

from dataclasses import dataclass, field, replace

import pytest

from anabranch.remembered import remembered


@dataclass(frozen=True)
class Squares:
    """Squares of numbers, and which of them were worked out."""

    made: list[int] = field(default_factory=list)

    @remembered
    def square(self, number: int, *, negative: bool = False) -> int:
        """The square, or less than nothing."""
        self.made.append(number)
        if number < 0:
            raise ValueError("negative")
        return -number * number if negative else number * number


def test_a_result_is_made_once_per_arguments():
    """Keywords count as arguments do."""
    squares = Squares()
    asked = [squares.square(3), squares.square(3), squares.square(2)]
    negated = [squares.square(3, negative=True) for _ in range(2)]
    assert (asked, negated, squares.made) == ([9, 9, 4], [-9, -9], [3, 2, 3])


def test_every_object_has_results_of_its_own():
    """A copy with another field must not give the results of the first."""
    first = Squares()
    assert first.square(3) == 9
    other = replace(first, made=[])
    assert (other.square(3), other.made, first) == (9, [3], Squares([3]))


def test_an_error_is_not_remembered():
    """Whoever asks again gets it again, from the method itself."""
    squares = Squares()
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            squares.square(-1)
    assert squares.made == [-1, -1]
