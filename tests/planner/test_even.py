"""Equal runs of the model in one order."""

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InfeasiblePlanError
from anabranch.planner.even import Even, even_runs
from tests.planner import shapes
from tests.planner.helpers import cost_model


@pytest.mark.parametrize(
    ("seconds", "count", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([3, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 3], 2, [3, 1]),
        ([5, 1, 1, 5], 3, [1, 2, 1]),
        ([2, 2], 2, [1, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([0, 0, 0, 5], 2, [3, 1]),  # of cuts that are as good the last
        ([2, 0, 2, 0, 2], 2, [4, 1]),
        ([4], 1, [1]),
    ],
)
def test_runs(seconds, count, expected):
    """Operators in each run, drawn by hand."""
    assert [j - i for i, j in even_runs(seconds, count)] == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_longest_run_is_as_short_as_can_be(seconds, data):
    """Against every cut."""
    count = data.draw(st.integers(1, len(seconds)))
    runs = even_runs(seconds, count)
    assert len(runs) == count
    assert all(i < j for i, j in runs)
    assert [0, *(j for _, j in runs)] == [*(i for i, _ in runs), len(seconds)]
    least = min(
        max(sum(seconds[i:j]) for i, j in pairwise([0, *cuts, len(seconds)]))
        for cuts in combinations(range(1, len(seconds)), count - 1)
    )
    assert max(sum(seconds[i:j]) for i, j in runs) == least


def test_one_device_per_stage():
    """As many stages as devices, in a row."""
    cost = cost_model(shapes.mmt(parts=1), 8, memory=2**40)
    for graph in Even()(cost, batch_size=8):
        assert [stage.replicas for stage in graph.stages] == [1] * 8
        assert graph.depth == 8


def test_replicas_where_devices_outnumber_operators():
    """Three operators on four devices: the slowest, the layer, gets two."""
    cost = cost_model(shapes.towers("small", 1, 0, layers=1, top=0), 4, memory=2**40)
    for graph in Even()(cost, batch_size=8, microbatch_size=8):
        assert [stage.replicas for stage in graph.stages] == [2, 1, 1]


def test_fewer_stages_with_more_replicas():
    """On eight devices rows of eight, four and two stages, and one stage on all of them."""
    cost = cost_model(shapes.mmt(parts=1), 8, memory=2**40)
    found = Even(fewer_stages=True)(cost, batch_size=8, microbatch_size=8)
    shapes_found = {tuple(stage.replicas for stage in graph.stages) for graph in found}
    assert shapes_found == {(1,) * 8, (2,) * 4, (4,) * 2, (8,)}


def test_says_what_its_stages_need():
    """1 GiB is too little for four stages of MMT; with what is named, to a tenth, they fit."""
    model = shapes.mmt(parts=1)
    with pytest.raises(InfeasiblePlanError, match=r"needs \d+\.\d\d GiB on a device") as refused:
        Even()(cost_model(model, 4, memory=2**30), batch_size=64)
    needed = float(re.findall(r"needs ([\d.]+) GiB", str(refused.value))[0])
    assert Even()(cost_model(model, 4, memory=int((needed + 0.1) * 2**30)), batch_size=64)
    with pytest.raises(InfeasiblePlanError):
        Even()(cost_model(model, 4, memory=int((needed - 0.1) * 2**30)), batch_size=64)
