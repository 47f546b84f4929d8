"""The benchmark of the runtime: every section measures something small, and shows it."""

import math
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from benchmarks.gpu import transformer as gpu_transformer
from benchmarks.planners.common import Row, profile_of
from benchmarks.runtime import __main__, halves, host, race, transformer
from tests.benchmarks.small import small_two_branch


def raced_once(sides: Any, ranks: int, **options: Any) -> dict[str, list[float]]:
    """A race of one step by each side."""
    return race.race(sides, ranks, **options | {"turns": 1, "steps": 1, "warm": 1})


PLANS_BY_HAND = transformer.plans_by_hand


def one_plan_by_hand(captured: Any) -> dict[str, Any]:
    """A row of two stages."""
    return dict([*PLANS_BY_HAND(captured).items()][:1])


SMALL: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "sleeps": ({}, (((2, 4, 1e-4, 2e-4),),)),
    "messages": ({}, (((4 << 10, 4),),)),
    "transformer": (
        {
            **{"BATCH": 8, "SIZES": transformer.SIZES | gpu_transformer.SMALL},
            "plans_by_hand": one_plan_by_hand,
        },
        (),
    ),
    "towers": ({"CASES": ((2, 2),), "FORWARD_S": 1e-4, "BACKWARD_S": 2e-4}, ()),
    "memory": ({"COUNTS": (4,), "SAMPLES": 64, "OURS": ("1f1b",), "THEIRS": ("1f1b",)}, ()),
    "halves": (
        {
            "SIZES": halves.SIZES | gpu_transformer.SMALL | {"layers": "2"},
            **{"LAYERS": 2, "STEPS": 1},
        },
        (),
    ),
    "emulated": (
        {
            **{"DEVICES": 4, "DATA_PARALLEL": {}, "GRAPHS": {"candle-uno": 4096}},
            "profile_of": partial(profile_of, branches="2", layers="1"),
        },
        (),
    ),
    "host": ({"MICROBATCHES": 4, "TURNS": 1, "SIZES": host.SIZES | {"layers": "3"}}, ()),
    "profile": ({"MICROBATCHES": 4, "STEPS": 2}, ()),
    "checks": ({"MODELS": ("two-branch",), "REPEATS": 1, "build": small_two_branch}, ()),
}
"""Section -> constants of its module, and arguments, with which it takes seconds."""


def test_every_section_is_among_the_small_ones():
    """A new one would otherwise never be run here."""
    assert SMALL.keys() == __main__.SECTIONS.keys()


@pytest.mark.dist
@pytest.mark.parametrize("name", list(SMALL))
def test_a_section_measures_and_shows(name: str, monkeypatch: pytest.MonkeyPatch):
    """Every measured number is finite, and every row is in the table."""
    module = import_module(f"benchmarks.runtime.{name}")
    constants, arguments = SMALL[name]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    if hasattr(module, "race"):
        monkeypatch.setattr(module, "race", raced_once)
    measure, show = __main__.SECTIONS[name]
    rows: list[Row] = list(measure(*arguments))
    assert rows
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    assert len(show(rows).splitlines()) > 2
