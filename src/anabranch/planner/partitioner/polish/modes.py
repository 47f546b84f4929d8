"""Changes of how stages use their devices and memory: recomputation, tensor-parallel degree.

Recomputation is tried for all stages without memory for a deep warm-up, for each alone and for
none; another degree for all stages and for each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anabranch.planner.partitioner.polish.plan_view import Parts, PlanView
from anabranch.planner.toolkit.parts import Part


def modes(spot: PlanView, *, recompute: bool) -> Iterator[Parts]:
    """The same stages, run otherwise; ``recompute`` allows recomputation."""
    parts = spot.parts
    yield tuple(replace(part, recompute=False) for part in parts)
    if recompute:
        short = spot.short_of_memory
        yield tuple(replace(part, recompute=part in short) for part in parts)
        for s in (s for s in spot.focus if parts[s] in short):
            yield spot.changed({s: replace(parts[s], recompute=not parts[s].recompute)})
    degrees = spot.cost.tensor_degrees
    for tensor in degrees if len(degrees) > 1 else ():
        for chosen in (*([s] for s in spot.focus), range(len(parts))):
            changed = {s: _sharded(parts[s], tensor) for s in chosen}
            if all(part is not None for part in changed.values()):
                yield spot.changed(changed)


def _sharded(part: Part, tensor: int) -> Part | None:
    """The part with so many devices per replica, on as many devices as before."""
    if part.devices % tensor:
        return None
    return replace(part, replicas=part.devices // tensor, tensor=tensor)
