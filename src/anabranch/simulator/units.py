"""Units: what devices do in a step besides sending and receiving, with its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from anabranch.plans.stages import StageGraph
from anabranch.remembered import remembered
from anabranch.schedule.schedule import Action, Kind
from anabranch.simulator.all_reduces import AllReduce
from anabranch.simulator.costs import StepCosts
from anabranch.simulator.events import Role
from anabranch.simulator.sums import Mark, Sum, final_pieces, gradient_marks, summing_s


class ComputeUnit(NamedTuple):
    """Compute that many steps have in common.

    Attributes:
        stage: index, or -1.
        before: bytes that are taken when it starts.
        after: bytes that are released when it ends.
        group: index of the devices of a gather, or -1.
        marks: its parts, where gradients become final in it.
        posts: receives that a ``BEGIN`` posts.
        ports: that a ``GATHER`` takes.
        stages: that read what a ``GATHER`` brings.
    """

    stage: int
    seconds: float
    before: float = 0.0
    after: float = 0.0
    group: int = -1
    marks: tuple[Mark, ...] = ()
    role: Role = Role.ACTION
    posts: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()


class ComputeUnits:
    """Units by number; equal ones are one.

    Attributes:
        numbers: of all that are known, ascending.
        groups: stages and devices of the gathers that several devices start together, likewise.

    Args:
        besides_s: seconds of each update besides its own.
    """

    def __init__(
        self,
        graph: StageGraph,
        costs: StepCosts,
        index: Mapping[int, int],
        sums: Sequence[Sum],
        besides_s: float = 0.0,
    ) -> None:
        self._graph, self._costs, self._besides_s = graph, costs, besides_s
        self._device = index
        self.numbers: dict[ComputeUnit, int] = {}
        self.groups: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._summing_s = summing_s(costs)
        self._pieces = final_pieces(sums)

    def number(self, unit: ComputeUnit) -> int:
        """Return the index of a unit."""
        return self.numbers.setdefault(unit, len(self.numbers))

    @cached_property
    def _replica_of(self) -> Mapping[tuple[int, int], int]:
        return {
            (s, device): at
            for s, stage in enumerate(self._graph.stages)
            for at, device in enumerate(stage.devices)
        }

    @cached_property
    def slices(self) -> Mapping[int, list[tuple[int, ...]]]:
        """Per device, of its stages: index, samples of the first and the last slice."""
        by_device: dict[int, list[tuple[int, ...]]] = {device: [] for device in self._device}
        for (s, device), replica in self._replica_of.items():
            last = self._graph.num_microbatches(s) - 1
            cuts = (self._graph.slice(s, i, replica) for i in (0, last))
            sizes = (stop - start for start, stop in cuts)
            by_device.setdefault(device, []).append((s, *sizes))
        return by_device

    def has_update(self, stage: int) -> bool:
        """Return True if a stage has gradients to sum, or takes time to update."""
        return stage in self._pieces or self._update_s(stage) > 0

    def _update_s(self, stage: int) -> float:
        return self._costs.update_s(stage) + self._besides_s

    def action(self, action: Action, device: int, is_last: bool) -> int:
        """Return the unit of a compute.

        Args:
            is_last: whether it is the last backward of its stage before an update.
        """
        stage, replica = action.stage, self._replica_of[action.stage, device]
        start, stop = self._graph.slice(stage, action.microbatch, replica)
        return self._priced(stage, action.kind, stop - start, is_last)

    def update(self, stage: int) -> int:
        """Return the unit of the update of a stage."""
        return self.number(ComputeUnit(stage, self._update_s(stage), role=Role.UPDATE))

    def overhead(self, seconds: float) -> int:
        """Return the unit of a device's time outside actions."""
        return self.number(ComputeUnit(-1, seconds, role=Role.OVERHEAD))

    def agreement(self) -> list[int]:
        """Return the units in which devices exchange totals."""
        lost = self._costs.overheads.agreement
        meeting = self.number(ComputeUnit(-1, 0.0, role=Role.AGREEMENT))
        messages = [self.overhead(lost.device_s)] * (lost.device_s > 0)
        return [*messages, meeting, *messages]

    def gathers(self, work: AllReduce) -> list[int]:
        """Return the units of the all-gather after an all-reduce."""
        members = tuple(self._device[device] for device in work.devices)
        group = self.groups.setdefault((work.stages, members), len(self.groups))
        unit = ComputeUnit(
            -1, work.gather_s, group=group, role=Role.GATHER, ports=work.ports, stages=work.stages
        )
        return [self.overhead(work.gather_work_s)] * (work.gather_work_s > 0) + [self.number(unit)]

    @remembered
    def _priced(self, stage: int, kind: Kind, samples: int, is_last: bool) -> int:
        seconds = self._costs.pass_s(stage, kind, samples)
        held, inside = self._costs.flight_bytes(stage, samples)
        before, after = inside, inside + held
        if kind is Kind.FORWARD:
            before, after = held, 0.0
        elif kind is not Kind.BACKWARD:
            before, after = (inside, 0.0) if kind is Kind.INPUT_GRADIENT else (0.0, after)
        if not is_last:
            return self.number(ComputeUnit(stage, seconds, before, after))
        seconds += self._summing_s[stage]
        pieces = self._pieces.get(stage, {})
        marks = gradient_marks(self._costs, pieces, stage, samples, seconds)
        return self.number(ComputeUnit(stage, seconds, before, after, marks=marks))
