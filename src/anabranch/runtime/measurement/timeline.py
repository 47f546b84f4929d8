"""A measured timeline: when the actions of all ranks began and ended, gathered after the step.

All ranks know all actions, so only times travel. Each rank's clock starts at a barrier, so clocks
of several machines need not agree.
"""

from __future__ import annotations

import torch

from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.mesh import Mesh
from anabranch.runtime.worker import Worker, executed
from anabranch.timeline import Span, Timeline


def gather_timeline(
    worker: Worker, outcome: Outcome, mesh: Mesh, start: float, end: float, lead: float = 0.0
) -> Timeline:
    """The spans of all ranks in one step, from ``start`` to ``end`` on this rank's clock.

    Args:
        lead: seconds of the step before the barrier, in which this rank read its batch; the longest
            of all ranks counts.
    """
    actions = {device: executed(worker.schedule, worker.graph, device) for device in mesh.devices}
    rows = max(map(len, actions.values())) + 1
    times = torch.zeros((rows, 2), dtype=torch.float64)
    seconds = worker.clock.seconds([mark for pair in outcome.times for mark in pair])
    for i, (begun, done) in enumerate(zip(seconds[::2], seconds[1::2], strict=True)):
        times[i, 0], times[i, 1] = begun - start, done - start
    times[-1, 0], times[-1, 1] = end - start, lead
    gathered = mesh.all_gather(times)
    lead = max(float(times[-1, 1]) for times in gathered)
    spans = tuple(
        Span(device, lead + float(times[i, 0]), lead + float(times[i, 1]), action)
        for device, times in zip(mesh.devices, gathered, strict=True)
        for i, action in enumerate(actions[device])
    )
    step_s = lead + max(float(times[-1, 0]) for times in gathered)
    return Timeline(spans, mesh.devices, "measured", step_s, {})
