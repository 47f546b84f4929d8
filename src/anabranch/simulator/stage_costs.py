"""Prices of one stage that do not depend on the other stages.

Stage graphs that a search simulates have most of their stages in common, so a cost model keeps
their prices (``stage_costs``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anabranch.cost import CostModel
from anabranch.cost.footprint import StageFootprint
from anabranch.cost.memory import MOST_TERMS, DeviceMemory
from anabranch.cost.sparse import most_samples, rows_pay
from anabranch.graph.opgraph import bits
from anabranch.plans.stages import Stage
from anabranch.remembered import remembered
from anabranch.schedule.schedule import Kind


class FlightBytes(NamedTuple):
    """Bytes of a micro-batch in a stage.

    Attributes:
        held: bytes from the start of its forward to the end of its backward.
        forward: bytes on top during its forward.
        backward: bytes on top during its backward.
        first_half: bytes on top during the first half of a split backward.
        waiting: bytes on top from the end of the first half to the end of the second.
    """

    held: float
    forward: float
    backward: float
    first_half: float
    waiting: float

    def change(self, kind: Kind) -> tuple[float, float]:
        """Return the bytes that a pass takes when it starts and releases when it ends."""
        if kind is Kind.FORWARD:
            return self.held + self.forward, self.forward
        if kind is Kind.BACKWARD:
            return self.backward, self.backward + self.held
        if kind is Kind.INPUT_GRADIENT:
            return self.first_half, self.first_half - self.waiting
        return 0.0, self.waiting + self.held


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Seconds and bytes of a stage on each of its devices.

    Attributes:
        batch_size: samples of a step.
    """

    cost: CostModel
    stage: Stage
    batch_size: int

    @cached_property
    def mask(self) -> int:
        return self.cost.graph.mask(self.stage.operators)

    @cached_property
    def footprint(self) -> StageFootprint:
        return self.cost.footprint(self.mask)

    @remembered
    def compute_s(self, samples: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward, with recomputation where the stage
        asks for it and with the fixed seconds of a pass.
        """
        besides_s = self.cost.calibration.pass_s if samples else 0.0
        forward, backward = self.cost.stage_s(self.mask, samples, recompute=self.stage.recompute)
        return forward + besides_s, backward + besides_s

    @remembered
    def weight_share(self, samples: int) -> float:
        """Return the share of a backward that gradients of weights take where it is split; a
        recomputed forward belongs to the first half.
        """
        backward_s = self.compute_s(samples)[1]
        return self.cost.weight_s(self.mask, samples) / backward_s if backward_s else 0.0

    def gradient_share(self, samples: int, operator: int) -> float:
        """Return the share of a backward's seconds that have passed when an operator's backward has
        ended. Operators go from the last to the first, behind the recomputed forward.
        """
        return self._gradient_shares(samples)[operator]

    @remembered
    def _gradient_shares(self, samples: int) -> dict[int, float]:
        ops, whole = list(bits(self.mask)), self.compute_s(samples)[1]
        each = self.cost.op_seconds(samples)[1] if whole else None
        seconds = np.zeros(len(ops)) if each is None else each[ops]
        shares = 1 - (np.cumsum(seconds) - seconds) / (whole or 1.0)
        return dict(zip(ops, shares.tolist(), strict=True))

    @cached_property
    def most_samples(self) -> int:
        """Samples of a whole batch on the fullest device."""
        stage = self.stage
        return most_samples(self.batch_size, stage.microbatch_size, stage.replicas)

    @cached_property
    def readers(self) -> Mapping[str, int]:
        """Trainable parameter -> the first operator of the stage that reads it."""
        ops, parameters = self.cost.graph.ops, self.cost.parameters
        readers = {name: i for i in reversed([*bits(self.mask)]) for name in ops[i].parameters}
        return {name: i for name, i in readers.items() if parameters[name].trainable}

    @cached_property
    def update_s(self) -> float:
        """Seconds of an update, by number and bytes of the trainable parameters; of the slowest
        replica, where replicas share the optimizer's state.
        """
        cost, replicas = self.cost, self.stage.replicas
        held = [{name: cost.parameters[name].nbytes for name in self.readers}]
        if cost.shard_optimizer and replicas > 1:
            held = cost.dealt(self.mask, replicas)
        return max(cost.update.seconds(len(part), self._touched_bytes(part)) for part in held)

    @cached_property
    def updated(self) -> tuple[float, ...]:
        """Bytes of trainable parameters that each of its replicas updates."""
        return self.cost.updated_bytes(self.mask, self.stage.replicas)

    def _touched_bytes(self, held: Mapping[str, int]) -> int:
        """Return the bytes that an update touches; of tables with sparse gradients only rows."""
        replicas, touched = self.stage.replicas, 0
        for name, nbytes in held.items():
            parameter = self.cost.parameters[name]
            table = parameter.table
            if table is not None and self.cost.has_rows(parameter):
                samples = self.most_samples
                whole = max(parameter.nbytes, 1)
                by_rows = replicas == 1 or rows_pay(table, whole, samples, replicas)
                rows = table.lookups * samples * replicas
                if by_rows:
                    nbytes = nbytes * min(whole, rows * table.row_bytes) // whole
            touched += nbytes
        return touched

    @remembered
    def held(self, versions: int = 1, replica: int | None = None) -> DeviceMemory:
        """Bytes of a replica with a number of weight versions; by default of the fullest."""
        stage, updated, terms = self.stage, max(self.updated), MOST_TERMS
        if replica is not None:
            # Replicas add terms in one order; the first two add the next one to theirs at once.
            updated, terms = self.updated[replica], min(max(replica, 1), MOST_TERMS)
        return self.cost.memory(
            self.footprint,
            stage.microbatch_size,
            stage.replicas,
            recompute=stage.recompute,
            versions=versions,
            updated=updated,
            terms=terms,
        )

    @remembered
    def flight_bytes(self, samples: int) -> FlightBytes:
        """Bytes of a micro-batch; activations are held, or recomputed during the backward."""
        footprint, recompute = self.footprint, self.stage.recompute
        flight = self.cost.memory(footprint, samples, 1, recompute=recompute).flight
        again = (footprint.kept * samples + footprint.kept_fixed) * recompute
        whole, (halves, per_sample) = footprint.passes, self.cost.split_passes(self.mask)
        forward, first_half = whole.at(samples), again + halves.at(samples)
        waiting = again + per_sample * samples
        return FlightBytes(*map(float, (flight, forward, again + forward, first_half, waiting)))


def stage_costs(cost: CostModel, stage: Stage, batch_size: int) -> StageCosts:
    """Return the prices of a stage on any devices with any warm-up; the cost model keeps them."""
    key = (stage.operators, stage.replicas, stage.microbatch_size, stage.recompute, batch_size)
    known: dict[Hashable, StageCosts] = cost.memo.setdefault(StageCosts, {})
    if key not in known:
        known[key] = StageCosts(cost, stage, batch_size)
    return known[key]
