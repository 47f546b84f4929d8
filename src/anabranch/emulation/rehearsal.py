"""Rehearsal of a plan on emulated devices, for ``anabranch rehearse``.

Local ranks stand for the devices (``emulation``). The first step connects them. Unless the caller
fixes a time scale, it is then doubled until the host keeps up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.emulation import EmulatedPipeline, Emulation
from anabranch.emulation.emulation import Links, require_time_scale
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.record import Run
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.run import step_seconds
from anabranch.solve import foreseen, ideal_step_s
from anabranch.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Rehearsing:
    """Tuned numbers of a rehearsal.

    Attributes:
        most_time_scale: most wall seconds per second of the devices.
        most_step_s: most wall seconds of a step up to which the time scale is doubled.
        late: most share of a step by which a rank may be late; the step may be too long by as much.
            With much more, ranks ask for links in another order than the devices would.
    """

    most_time_scale: float = 64.0
    most_step_s: float = 20.0
    late: float = 0.03


REHEARSING = Rehearsing()


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal, in seconds of the emulated devices.

    Attributes:
        run: steps as the wall clock showed them, with the timeline of the median one.
        device_step_s: seconds of the same steps by the devices' own clocks.
        late_s: most seconds by which a rank was late, per step.
        runtime_s: CPU time of the runtime for each forward or backward on this machine, the mean
            of all ranks in the step before these.
        with_runtime_s: predicted step if each pass takes longer by ``runtime_s``.
        time_scale: wall seconds per second of the devices.
    """

    run: Run
    device_step_s: tuple[float, ...]
    late_s: tuple[float, ...]
    runtime_s: float
    with_runtime_s: float
    time_scale: float
    links: Links
    message_bytes: int
    num_messages: int

    @property
    def step_s(self) -> float:
        """Median seconds of a step, as the wall clock showed them."""
        return self.run.median_step_s

    @property
    def late(self) -> float:
        """Median share of a step by which a rank was late at worst."""
        return statistics.median(
            late / step for late, step in zip(self.late_s, self.run.step_s, strict=True)
        )

    @property
    def keeps_up(self) -> bool:
        """Return True if the host was fast enough for this time scale."""
        return self.late <= REHEARSING.late

    def figures(self) -> dict[str, Any]:
        """Return the figures that the command line prints."""
        return {
            **self.run.figures(),
            "emulated": True,
            "device_step_s": statistics.median(self.device_step_s),
            "late_s": statistics.median(self.late_s),
            "runtime_s": self.runtime_s,
            "predicted_with_runtime_s": self.with_runtime_s,
            "time_scale": self.time_scale,
            "links": self.links,
            "ranks": len(self.run.plan.stage_graph.devices),
            "message_bytes": self.message_bytes,
            "messages": self.num_messages,
        }


def rehearse(
    plan: Plan,
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    steps: int = 5,
    links: Links = "modelled",
    time_scale: float | None = None,
    timeout: float = 600.0,
    watch: Callable[[int, int], None] | None = None,
) -> Rehearsal:
    """Run a plan on emulated devices, each a local rank.

    Args:
        plan: a plan of any planner.
        cluster: cluster on which it shall run; by default the plan's.
        steps: steps to measure, besides those that set things up.
        links: ``modelled`` or ``host``, see ``Emulation``.
        time_scale: wall seconds per second of the devices; by default as the host can keep up.
        timeout: wall seconds until a silent rank counts as lost.
        watch: called with steps done and steps to do, on the first rank.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster, or cannot be run.
        ProfileError: if the profile has no times for its micro-batches.
        ValueError: for a number of steps below 1 or a wrong time scale.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps; at least 1 is needed")
    if time_scale is not None:
        require_time_scale(time_scale, links)
    plan, predicted = foreseen(plan, profile, cluster)
    machines = plan.machines
    assert machines is not None
    emulation = Emulation(plan, profile, machines, links=links)
    fixed = 1.0 if links == "host" else time_scale

    def rank() -> tuple[list[_Step], float, float]:
        return _measure(emulation, steps, fixed, timeout, watch)

    measured, runtime_s, scale = launch.run(rank, len(emulation.devices))[0]
    step_s, device_step_s, late_s, timelines = zip(*measured, strict=True)
    middle = sorted(range(steps), key=step_s.__getitem__)[steps // 2]
    run = Run(
        plan=plan,
        losses=(),
        step_s=step_s,
        ideal_step_s=_ideal(emulation, profile),
        timelines=(("predicted", predicted), ("emulated", timelines[middle])),
    )
    costs = emulation.costs
    slower = _WithRuntime(costs.graph, costs.cost, runtime_s=runtime_s)
    return Rehearsal(
        run,
        device_step_s,
        late_s,
        runtime_s,
        step_seconds(costs.graph, emulation.schedule, slower),
        scale,
        links,
        emulation.message_bytes,
        emulation.num_messages,
    )


@dataclass(frozen=True)
class _WithRuntime(ModelCosts):
    """Prices where the runtime takes CPU time for each forward and backward."""

    runtime_s: float = 0.0

    def compute_s(self, stage: int, samples: int) -> tuple[float, float]:
        """Return forward and backward seconds; 0 for no samples."""
        forward, backward = super().compute_s(stage, samples)
        besides_s = self.runtime_s if samples else 0.0
        return forward + besides_s, backward + besides_s


_Step = tuple[float, float, float, Timeline]
"""Seconds by the wall clock and by the devices' clocks, most seconds late, and the timeline."""


def _measure(
    emulation: Emulation,
    steps: int,
    time_scale: float | None,
    timeout: float,
    watch: Callable[[int, int], None] | None,
) -> tuple[list[_Step], float, float]:
    """On each rank: find a time scale and run the steps. Return these, ``runtime_s`` and scale."""
    pipe = EmulatedPipeline(emulation, time_scale=time_scale or 1.0, timeout=timeout)
    pipe.step()
    if time_scale is None:
        _slow_down(pipe)
    runtime_s = pipe.runtime_s
    results: list[_Step] = []
    for done in range(steps):
        seconds = pipe.step(record=True)
        assert pipe.timeline is not None
        results.append((seconds, pipe.device_step_s, pipe.late_s, pipe.timeline))
        if watch is not None and pipe.rank == 0:
            watch(done + 1, steps)
    return results, runtime_s, pipe.time_scale


def _slow_down(pipe: EmulatedPipeline) -> None:
    """Double the time scale until the host keeps up; every rank sees the same figures."""
    while True:
        # Twice, because another process may have used the host for a moment.
        for _ in range(2):
            seconds = pipe.step()
            if pipe.late_s <= 0.75 * REHEARSING.late * seconds:
                return
        slower_s = 2 * pipe.time_scale * seconds
        if pipe.time_scale >= REHEARSING.most_time_scale or slower_s > REHEARSING.most_step_s:
            return
        pipe.time_scale *= 2


def _ideal(emulation: Emulation, profile: Profile) -> float:
    """Return the step of the schedule with links that cost nothing."""
    graph, costs = emulation.plan.stage_graph, emulation.costs
    forward, backward = (
        [{n: costs.compute_s(s, n)[way] for n in graph.slice_sizes(s)} for s in range(len(graph))]
        for way in (0, 1)
    )
    return ideal_step_s(emulation.plan, forward, backward, model=profile.graph)
