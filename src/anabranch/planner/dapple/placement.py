"""Placement of the next stage: DAPPLE's three policies, composed (section 4.2).

Per machine (an innermost group of the cluster) only the number of devices in use matters, and
machines that the topology does not tell apart may be exchanged. So states are sorted: 4 machines of
8 devices have 495 of them instead of 4,681 or 2^32::

    in use (6, 2, 0, 0), for a stage of 4:
        fresh first    (0, 0, 4, 0)     from an unused machine
        append first   (0, 4, 0, 0)     from machines already in use
        scatter first  (2, 2, 0, 0)     evenly from all that are in use, from all if none is

Where the paper is silent: a policy that runs out of its machines goes on with the others. Fresh
first fills one unused machine after the other. Append first takes the used machine with the least
room that has enough; if none has, those with the most room first, as the fresh policy does then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from anabranch.cluster import Cluster
from anabranch.cost.nested_sets import Ints
from anabranch.planner.dapple.links import Place
from anabranch.remembered import remembered

Policy = Callable[[Place, int, int], Place]
"""(devices in use per machine, devices of a machine, devices wanted) -> devices per machine."""


def fresh_first(used: Place, size: int, wanted: int) -> Place:
    """Take devices of unused machines, one machine after the other."""
    fresh = [m for m, count in enumerate(used) if not count]
    return _fill(used, size, wanted, [*fresh, *_by_room(used, size, wanted)])


def append_first(used: Place, size: int, wanted: int) -> Place:
    """Take devices of machines that are in use already."""
    fresh = [m for m, count in enumerate(used) if not count]
    return _fill(used, size, wanted, [*_by_room(used, size, wanted), *fresh])


def scatter_first(used: Place, size: int, wanted: int) -> Place:
    """Take the same number from every machine in use, or from all machines if none is."""
    taken = [0] * len(used)
    fresh = [m for m, count in enumerate(used) if not count]
    for group in ([m for m, count in enumerate(used) if count], fresh):
        while wanted and any(used[m] + taken[m] < size for m in group):
            for m in group:
                if wanted and used[m] + taken[m] < size:
                    taken[m] += 1
                    wanted -= 1
    return tuple(taken)


def _by_room(used: Place, size: int, wanted: int) -> list[int]:
    """Sort used machines: fullest first with enough free devices, then emptiest first without."""

    def key(m: int) -> tuple[bool, int, int]:
        room = size - used[m]
        return room < wanted, room if room >= wanted else -room, m

    return sorted((m for m, count in enumerate(used) if count), key=key)


def _fill(used: Place, size: int, wanted: int, machines: Iterable[int]) -> Place:
    taken = [0] * len(used)
    for m in machines:
        taken[m] = min(size - used[m], wanted)
        wanted -= taken[m]
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)
"""All three, composed."""


class Machines:
    """The machines of a cluster, and cached states reached by the policies.

    Attributes:
        size: devices of one machine.
        places: all places so far, by number; place 0 has no devices.
    """

    def __init__(self, cluster: Cluster, policies: tuple[Policy, ...] = POLICIES) -> None:
        self.cluster = cluster
        self.size = cluster.group_sizes[0]
        self._policies = policies
        self._number: dict[Place, int] = {}
        self._levels: list[int] = []
        self.places: list[Place] = []
        self.number((0,) * (cluster.num_devices // self.size))

    def number(self, place: Place) -> int:
        if place not in self._number:
            self._number[place] = len(self.places)
            self.places.append(place)
            used = [m * self.size for m, count in enumerate(place) if count]
            level = self.cluster.link(used[0], used[-1]).level if used else 0
            self._levels.append(level)
        return self._number[place]

    def table(self) -> tuple[Ints, Ints]:
        """Return places as [place, machine], and the level that connects the devices of each."""
        return np.array(self.places, np.int64), np.array(self._levels, np.int64)

    @remembered
    def steps(self, state: int) -> Ints:
        """Return the ways to add a stage that leave devices for another, without duplicates.

        Columns: the next state; places of the stage in the machine order of the next state and of
        this one; place of the devices left, in the order of the next state.
        """
        used = self.places[state]
        taken = dict.fromkeys(
            policy(used, self.size, wanted)
            for wanted in range(1, self.cluster.num_devices - sum(used))
            for policy in self._policies
        )
        return np.array([self._step(used, place) for place in taken], np.int64).reshape(-1, 4)

    def devices(self, steps: Sequence[Ints]) -> list[tuple[int, ...]]:
        """Return devices of stages placed in turn, last stage first, and of one more stage."""
        machines = list(reversed(range(self.cluster.num_devices // self.size)))
        left = [list(range(m * self.size, (m + 1) * self.size)) for m in range(len(machines))]
        result, used = [], self.places[0]
        for after, _, number, _ in steps:
            place = self.places[number]
            taken = []
            for m, count in zip(machines, place, strict=True):
                taken += [left[m].pop() for _ in range(count)]
            result.append(tuple(sorted(taken)))
            machines = [machines[m] for m in self._order(used, place)]
            used = self.places[after]
        result.append(tuple(sorted(device for rest in left for device in rest)))
        return result

    def _step(self, used: Place, taken: Place) -> tuple[int, ...]:
        order = self._order(used, taken)
        after = tuple(used[m] + taken[m] for m in order)
        rest = tuple(self.size - count for count in after)
        return tuple(map(self.number, (after, tuple(taken[m] for m in order), taken, rest)))

    def _order(self, used: Place, taken: Place) -> tuple[int, ...]:
        """Return machines in the next state's order: sorted in racks, racks in rows, and so on."""
        keys = [(-u - t, -t) for u, t in zip(used, taken, strict=True)]
        groups = [[m] for m in range(len(keys))]
        for level in self.cluster.levels[1:]:
            merged = []
            for start in range(0, len(groups), level.size):
                members = groups[start : start + level.size]
                members.sort(key=lambda group: [keys[m] for m in group])
                merged.append([m for group in members for m in group])
            groups = merged
        return tuple(m for group in groups for m in group)
