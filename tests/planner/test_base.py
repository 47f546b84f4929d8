"""Options of planners out of range are refused with their name, value and range."""

import math
from dataclasses import fields

import pytest

from anabranch.planner import PLANNERS

AT_LEAST_1 = ("max_replicas", "candidates", "width", "budget", "pairs", "steps")
AT_LEAST_0 = ("evaluations", "seed")
TOLERANCES = {"graphpipe": 1e-06, "sequential": 1e-06}
"""Of searches that halve an interval until it is so small."""
WRONG = [
    (name, field.name, value)
    for name, planner in PLANNERS.items()
    for field in fields(planner())
    for value in (
        (0, -3, math.nan, math.inf)
        if field.name in AT_LEAST_1
        else (-0.1, math.nan, math.inf, -math.inf)
        if field.name in ("tolerance", *AT_LEAST_0)
        else ()
    )
]


def test_every_number_has_a_range():
    """No planner has an option with a number that the others of this file forget."""
    for name, planner in PLANNERS.items():
        for field in fields(planner()):
            if "int" in str(field.type) or "float" in str(field.type):
                assert field.name in (*AT_LEAST_1, *AT_LEAST_0, "tolerance"), (name, field.name)


@pytest.mark.parametrize(("name", "option", "value"), WRONG)
def test_names_option_value_and_range(name, option, value):
    """Zero, negative, infinite and NaN, as soon as they are set."""
    least = TOLERANCES.get(name, 0) if option not in AT_LEAST_1 else 1
    with pytest.raises(ValueError, match=f"option {option} of planner {name} is {value}; ") as said:
        PLANNERS[name](**{option: value})
    assert str(said.value).endswith(f"at least {least}")


@pytest.mark.parametrize("name", PLANNERS)
def test_the_least_values_are_fine(name):
    """1, 0 or the least tolerance, None where the type allows it."""
    for field in fields(PLANNERS[name]()):
        if field.name in AT_LEAST_1:
            PLANNERS[name](**{field.name: 1})
        if "None" in str(field.type):
            PLANNERS[name](**{field.name: None})
        if field.name == "tolerance":
            PLANNERS[name](tolerance=TOLERANCES.get(name, 0.0))
