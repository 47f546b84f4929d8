"""Places for the next stage: DAPPLE's three policies, composed (section 4.2).

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
from dataclasses import dataclass, field
from functools import cached_property

from anabranch.cluster import Cluster
from anabranch.planner.dapple.links import Place

Policy = Callable[[Place, int, int], Place]
"""Devices per machine for a stage, by those in use, devices of a machine, and devices wanted."""


def fresh_first(used: Place, size: int, wanted: int) -> Place:
    """Devices of unused machines, one machine after the other."""
    fresh = [m for m, count in enumerate(used) if not count]
    return _fill(used, size, wanted, [*fresh, *_by_room(used, size, wanted)])


def append_first(used: Place, size: int, wanted: int) -> Place:
    """Devices of machines that are in use already."""
    fresh = [m for m, count in enumerate(used) if not count]
    return _fill(used, size, wanted, [*_by_room(used, size, wanted), *fresh])


def scatter_first(used: Place, size: int, wanted: int) -> Place:
    """The same number from every machine in use, or from every machine if none is."""
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
    """Used machines: first those that have room for all, the tightest first, then the roomiest."""

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


@dataclass(frozen=True)
class Placement:
    """One more stage in a state.

    Attributes:
        taken: its devices per machine, before sorting.
        order: machines in the order of the next state.
        used: the next state: devices in use per machine.
        place: ``taken`` in that order.
    """

    taken: Place
    order: tuple[int, ...]
    used: Place
    place: Place


@dataclass(frozen=True)
class Machines:
    """The machines of a cluster and the states that the policies lead to; remembered."""

    cluster: Cluster
    policies: tuple[Policy, ...] = POLICIES
    _steps: dict[tuple[Place, int], tuple[Placement, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def size(self) -> int:
        """Devices of one machine."""
        return self.cluster.group_sizes[0]

    @cached_property
    def empty(self) -> Place:
        """Nothing in use."""
        return (0,) * (self.cluster.num_devices // self.size)

    def rest(self, used: Place) -> Place:
        """All devices that are not in use."""
        return tuple(self.size - count for count in used)

    def steps(self, used: Place, wanted: int) -> tuple[Placement, ...]:
        """What the policies make of a request; each outcome once."""
        if (used, wanted) not in self._steps:
            taken = dict.fromkeys(policy(used, self.size, wanted) for policy in self.policies)
            self._steps[used, wanted] = tuple(self._step(used, place) for place in taken)
        return self._steps[used, wanted]

    def devices(self, steps: Sequence[Placement]) -> list[tuple[int, ...]]:
        """Devices of stages that were placed in turn, the last ones first, and of one more."""
        machines = list(reversed(range(len(self.empty))))
        left = [list(range(m * self.size, (m + 1) * self.size)) for m in range(len(machines))]
        result = []
        for step in steps:
            taken = []
            for m, count in zip(machines, step.taken, strict=True):
                taken += [left[m].pop() for _ in range(count)]
            result.append(tuple(sorted(taken)))
            machines = [machines[m] for m in step.order]
        result.append(tuple(sorted(device for rest in left for device in rest)))
        return result

    def _step(self, used: Place, taken: Place) -> Placement:
        keys = [(-u - t, -t) for u, t in zip(used, taken, strict=True)]
        order = self._sorted(keys)
        return Placement(
            taken,
            order,
            tuple(used[m] + taken[m] for m in order),
            tuple(taken[m] for m in order),
        )

    def _sorted(self, keys: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Machines sorted inside their racks, racks inside their rows, and so on."""
        groups = [[m] for m in range(len(keys))]
        for level in self.cluster.levels[1:]:
            merged = []
            for start in range(0, len(groups), level.size):
                members = groups[start : start + level.size]
                members.sort(key=lambda group: [keys[m] for m in group])
                merged.append([m for group in members for m in group])
            groups = merged
        return tuple(m for group in groups for m in group)
