"""One rank of an emulation, the counterpart of ``Pipeline``.

::

    step()   clear the shared links, agree on a start          mesh
             the actions of the schedule                       worker, compute and links emulated
             all-reduces, from the last backwards on           shared links, or mesh
             exchange the times at which ranks were done       mesh
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from anabranch.emulation.clock import DeviceClock
from anabranch.emulation.compute import EmulatedCompute, EmulatedSums
from anabranch.emulation.emulation import Emulation, require_time_scale
from anabranch.emulation.shared_links import POSTED, SENT
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.measurement.timeline import gather_timeline
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.transport import Channel, Receipt, Spec, Transport
from anabranch.runtime.worker import Worker
from anabranch.timeline import Span, Timeline


class EmulatedPipeline:
    """Runs steps of an emulation; each rank makes one, under ``launch.run``.

    Attributes:
        time_scale: wall seconds per second of the devices; may change between steps.
        timeline: timeline of the last recorded step, in the devices' time, the same on every rank.
        device_step_s: seconds of the last step by the devices' own clocks; the host causes the
            difference to the wall clock.
        runtime_s: CPU time of the runtime in the last step for each forward or backward, the mean
            of all ranks.
        late_s: most seconds by which any rank was late in the last step, in the devices' time.

    Raises:
        InvalidPlanError: if the number of ranks is not that of the plan's devices.
        ValueError: if the time scale is not positive, or for links of the host is not 1.
    """

    def __init__(
        self, emulation: Emulation, *, time_scale: float = 1.0, timeout: float = 600.0
    ) -> None:
        require_time_scale(time_scale, emulation.links)
        self._emulation, self.time_scale = emulation, time_scale
        self._mesh = Mesh(emulation.devices, emulation.sets, timeout=timeout)
        self._clock = DeviceClock()
        self._links: EmulatedTransport | None = None
        if inner := self._mesh.transport():
            self._links = EmulatedTransport(inner, self.rank, emulation, self._clock)
        with self._mesh.failure.reporting(self.close):
            self._sums = EmulatedSums(emulation, self._clock, self._mesh)
            graph, costs = emulation.plan.stage_graph, emulation.costs
            device, schedule = self._mesh.device, emulation.schedule
            layout, split = emulation.layout(device), schedule.split_stages
            compute = EmulatedCompute(layout, costs, self._clock, self._sums, split)
            cpu, links, rank_of = torch.device("cpu"), self._links, graph.rank_of
            self._worker = Worker(layout, graph, schedule, device, compute, links, rank_of, cpu)
        gathers = (work.gather_s for work in costs.all_reduces() if device in work.devices)
        self._update_s = sum(map(costs.update_s, graph.stages_of[device])) + sum(gathers)
        self._passes = sum(action.kind.is_compute for action in self._worker.actions)
        self.timeline: Timeline | None = None
        self.device_step_s = self.runtime_s = self.late_s = 0.0
        self.step_number = 0

    @property
    def rank(self) -> int:
        return self._mesh.rank

    def step(self, *, record: bool = False) -> float:
        """Run one step.

        Returns:
            Seconds of the step in the devices' time, as the wall clock showed them: from the common
            start to the end of the last compute or all-reduce on any rank, and the longest update.
        """
        with self._mesh.failure.reporting(self.close):
            POSITION.begin(self.step_number)
            self._begin()
            outcome = self._worker.run({}, self.step_number, watcher=self._sums)
            self._sums.finish()
            seconds = self._gather(outcome, self._clock.wall, record)
            POSITION.leave()
        self.step_number += 1
        return seconds

    def _begin(self) -> None:
        mesh = self._mesh
        self._emulation.shared_links.clear(mesh.rank)
        if self._links is not None:
            self._links.begin()
        # Ranks come out of the meeting one after another; they begin together a little later.
        latest = max(mesh.gather(time.perf_counter()))
        self._clock.start(latest + 2e-3 + 3e-4 * mesh.size, self.time_scale)

    def _gather(self, outcome: Outcome, end: float, record: bool) -> float:
        """Exchange the ends of all ranks; after this no rank reads the shared links any more."""
        mesh, clock = self._mesh, self._clock
        runtime_s = clock.charged_s / self._passes
        spent = [clock.now, end, clock.late_s, self._update_s, runtime_s]
        figures = [*zip(*mesh.gather(spent), strict=True)]
        self.device_step_s, seconds, self.late_s, update_s, _ = map(max, figures)
        self.runtime_s = statistics.fmean(figures[-1])
        # Updates begin together, when all ranks have agreed, and wait for nothing.
        self.device_step_s, seconds = self.device_step_s + update_s, seconds + update_s
        if record:
            start = clock.origin
            stop = start + seconds * clock.scale
            timeline = gather_timeline(self._worker.clock, outcome, mesh, start, stop)
            self.timeline = _rescaled(timeline, clock.scale)
        return float(seconds)

    def close(self) -> None:
        """Break this rank's connections; other ranks notice when they next wait for it."""
        if self._links is not None:
            self._links.close()
        self._mesh.close()


def _rescaled(timeline: Timeline, scale: float) -> Timeline:
    """Return a timeline of the wall clock in the devices' time."""
    spans = tuple(Span(s.device, s.start / scale, s.end / scale, s.action) for s in timeline.spans)
    return replace(timeline, spans=spans, step_s=timeline.step_s / scale)


class EmulatedTransport:
    """Sends messages through another transport. On modelled links a message arrives at the time of
    the model; its content is dropped, and tensors without content take its place. On links of this
    machine it takes as long as it does, and the wall clock is the devices' time.
    """

    def __init__(
        self, inner: Transport, rank: int, emulation: Emulation, clock: DeviceClock
    ) -> None:
        self._inner, self._rank, self._emulation, self._clock = inner, rank, emulation, clock
        self._shared = emulation.shared_links if emulation.links == "modelled" else None
        self._counts: Counter[Channel] = Counter()

    def begin(self) -> None:
        """Start a step, on links that have been cleared."""
        self._counts.clear()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        if self._shared is None:
            self._inner.send(tensors, rank, tag)
            return
        self._clock.charge()
        self._meet(Channel(self._rank, rank, tag), SENT, sum(tensor.nbytes for tensor in tensors))
        self._inner.send(tensors, rank, tag)
        self._clock.resume()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        if self._shared is None:
            return _TimedReceipt(self._inner.receive(specs, device, rank, tag), self._clock)
        self._clock.charge()
        channel = Channel(rank, self._rank, tag)
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in specs)
        arrival = partial(self._shared.arrival, channel, self._meet(channel, POSTED, nbytes))
        receipt = self._inner.receive(specs, device, rank, tag)
        self._clock.resume()
        return _TimedReceipt(receipt, self._clock, arrival, specs)

    def _meet(self, channel: Channel, end: int, nbytes: int) -> int:
        """Note one end of the next message of a channel; return the number of the message."""
        assert self._shared is not None
        number, devices = self._counts[channel], self._emulation.devices
        route = self._emulation.costs.route(devices[channel.sender], devices[channel.receiver])
        self._counts[channel] += 1
        self._shared.meet(channel, number, end, self._clock.now, route, nbytes)
        return number

    def settle(self) -> None:
        """See ``Transport``; sent messages are on their way already."""

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class _TimedReceipt:
    """A receive. ``arrival`` returns the arrival time of its message; None on links of the host."""

    inner: Receipt
    clock: DeviceClock
    arrival: Callable[[], float] | None = None
    specs: Sequence[Spec] = ()

    def wait(self) -> list[Tensor]:
        if self.arrival is None:
            tensors = self.inner.wait()
            self.clock.charge()
            self.clock.catch_up()
        else:
            self.clock.charge()
            # The sender notes the time before it sends, so it is known when the bytes have come.
            self.inner.wait()
            self.clock.meet(self.arrival())
            tensors = [
                torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.specs
            ]
        self.clock.resume()
        return tensors
