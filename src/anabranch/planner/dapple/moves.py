"""Moves: all ways to add a stage in front of those of a state."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from anabranch.cost.nested_weights import Floats
from anabranch.planner.dapple.labels import Index
from anabranch.planner.dapple.links import Place, hop_prices
from anabranch.planner.dapple.placement import Machines, Placement
from anabranch.planner.dapple.tables import Tables


class PlaceNumbers:
    """Numbers for places, in the order in which they come up."""

    def __init__(self, first: Place) -> None:
        self._number = {first: 0}
        self.places = [first]

    def __getitem__(self, place: Place) -> int:
        if place not in self._number:
            self._number[place] = len(self.places)
            self.places.append(place)
        return self._number[place]


class Moves:
    """All ways to add a stage in one state with devices left for another; the same for every cut.

    Attributes:
        degree: place of its number of replicas in the tables.
        target: number of the state that it leads to.
        place: number of its place there.
        free: devices that are left there.
    """

    def __init__(
        self,
        used: Place,
        machines: Machines,
        tables: Tables,
        places: PlaceNumbers,
    ) -> None:
        self._machines = machines
        self._tables = tables
        left = machines.cluster.num_devices - sum(used)
        ways = [
            (k, step)
            for k, degree in enumerate(tables.degrees)
            if left - degree >= tables.degrees[0]
            for step in machines.steps(used, degree)
        ]
        self.steps: list[Placement] = [step for _, step in ways]
        self.degree: Index = np.array([k for k, _ in ways], dtype=np.intp)
        self.target: Index = np.array([places[step.used] for step in self.steps], dtype=np.intp)
        self.place: Index = np.array([places[step.place] for step in self.steps], dtype=np.intp)
        self.free: Index = left - np.array(tables.degrees, dtype=np.intp)[self.degree]

    def __len__(self) -> int:
        return len(self.steps)

    def hops(self, targets: list[Place]) -> tuple[Floats, Floats]:
        """Price per byte and latency from the stage to stages behind it: [move, target]."""
        sources = np.array([step.taken for step in self.steps])
        return hop_prices(self._machines.cluster, sources[:, None, :], np.array(targets))

    def ring(self, move: int) -> Floats:
        """Seconds of the all-reduce of every run of operators as the stage: [i, j]."""
        return self._tables.reduce_s(self.steps[move].taken)

    @cached_property
    def closing(self) -> Index:
        """Place of ``free`` in the tables, -1 if one stage cannot be on so many devices."""
        return self._tables.index[self.free]

    @cached_property
    def closing_hop(self) -> tuple[Floats, Floats]:
        """Price per byte and latency between a stage on all devices left and this one."""
        rest = np.array([self._machines.rest(step.used) for step in self.steps])
        place = np.array([step.place for step in self.steps])
        return hop_prices(self._machines.cluster, rest, place)

    @cached_property
    def closing_ring(self) -> Floats:
        """Seconds of the all-reduce of all before a cut on all devices left: [move, cut]."""
        rings = np.zeros((len(self), len(self._tables.work_s)))
        for k, step in enumerate(self.steps):
            if self.closing[k] >= 0:
                rings[k] = self._tables.reduce_s(self._machines.rest(step.used))[0]
        return rings
