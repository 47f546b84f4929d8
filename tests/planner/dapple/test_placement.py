"""The three policies by eye, and the states that they lead to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster, Level
from anabranch.planner.dapple.links import Place
from anabranch.planner.dapple.placement import Machines, append_first, fresh_first, scatter_first


@pytest.mark.parametrize(
    ("used", "wanted", "fresh", "append", "scatter"),
    [
        # Nothing in use: scatter takes from all.
        ((0, 0), 4, (4, 0), (4, 0), (2, 2)),
        ((0, 0), 3, (3, 0), (3, 0), (2, 1)),
        ((0, 0), 6, (4, 2), (4, 2), (3, 3)),
        # One in use: only fresh goes to the other; those that run out go on there.
        ((2, 0), 2, (0, 2), (2, 0), (2, 0)),
        ((2, 0), 4, (0, 4), (2, 2), (2, 2)),
        ((3, 0), 5, (1, 4), (1, 4), (1, 4)),
        # Both in use: append takes the tightest that has room for all.
        ((3, 1), 1, (1, 0), (1, 0), (1, 0)),
        ((3, 1), 2, (0, 2), (0, 2), (1, 1)),
        ((3, 1), 4, (1, 3), (1, 3), (1, 3)),
    ],
)
def test_on_two_machines_of_four(used, wanted, fresh, append, scatter):
    """Devices per machine that each policy takes."""
    assert fresh_first(used, 4, wanted) == fresh
    assert append_first(used, 4, wanted) == append
    assert scatter_first(used, 4, wanted) == scatter


def test_figure_5_of_the_paper():
    """Three machines of 8, two of them in use in part, a request for 6."""
    used = (6, 4, 0)
    assert fresh_first(used, 8, 6) == (0, 0, 6)
    assert append_first(used, 8, 6) == (2, 4, 0)
    assert scatter_first(used, 8, 6) == (2, 4, 0)
    assert scatter_first((4, 3, 0), 8, 6) == (3, 3, 0)


def machines(nodes: int, size: int, racks: int = 1) -> Machines:
    levels = [Level("node", size, 1.0, 0.0), Level("network", nodes, 1.0, 0.0)]
    if racks > 1:
        levels.append(Level("racks", racks, 1.0, 0.0))
    return Machines(Cluster("machines", "cpu", 10**9, tuple(levels)))


def test_states_are_sorted():
    """A machine with 1 and one with 3 in use are the state (3, 1), and the stage's place goes
    along.
    """
    assert ((3, 1), (3, 0), (0, 3), (1, 3)) in steps(machines(2, 4), (1, 0))


def test_machines_are_only_exchanged_inside_their_rack():
    """Two racks of two: the second rack fills up and comes first, its machines stay together."""
    racks = machines(2, 4, racks=2)
    state, place, taken, rest = racks._step((2, 0, 0, 0), (0, 0, 1, 4))
    assert racks.places[state] == (4, 1, 2, 0)
    assert racks.places[place] == (4, 1, 0, 0)
    assert racks.places[taken] == (0, 0, 1, 4)
    assert racks.places[rest] == (0, 3, 2, 4)


def steps(machines: Machines, used: Place) -> list[tuple[Place, ...]]:
    """The places of all steps: next state, stage in its order and in this one's, rest."""
    found = machines.steps(machines.number(used)).tolist()
    return [tuple(machines.places[number] for number in step) for step in found]


@given(st.sampled_from([(2, 4, 1), (3, 2, 1), (2, 2, 2), (6, 1, 1)]), st.data())
def test_stages_get_the_devices_that_their_places_say(shape, data):
    """Any stages placed one after the other: disjoint, all devices, as many per machine."""
    cluster = machines(*shape)
    state, total, chosen = 0, cluster.cluster.num_devices, []
    while len(ways := cluster.steps(state)) and data.draw(st.booleans()):
        chosen.append(ways[data.draw(st.integers(0, len(ways) - 1))])
        state = chosen[-1][0]
    devices = cluster.devices(chosen)
    assert sorted(d for stage in devices for d in stage) == list(range(total))
    for step, taken in zip(chosen, devices, strict=False):
        per_machine = [sum(d // shape[1] == m for d in taken) for m in range(total // shape[1])]
        assert sorted(per_machine) == sorted(cluster.places[step[2]])


def test_the_first_stage_begins_on_device_0():
    """Devices are given out from the back, the last stage first."""
    cluster = machines(2, 4)
    step = next(s for s in cluster.steps(0) if cluster.places[s[2]] == (4, 0))
    assert cluster.devices([step]) == [(4, 5, 6, 7), (0, 1, 2, 3)]
