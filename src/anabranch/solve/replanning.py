"""A better plan for a running run, from its measured steps, on devices of unequal speed.

A profile is measured once, on one device and alone. A run knows more: how long each stage takes
where it runs. A part of the difference is due to the device. It shows in a fixed piece of work that
all ranks do at the same time. The rest is due to the operators, and corrects their profile::

    measured / predicted of a stage  =  slowness of its device  x  correction of its operators

Planners know identical devices only. So the operators of a slow device in the best plan so far are
given to them as slower, and their proposals give that device less work. The busiest stages of a
proposal go to the fast devices, and the simulator, which knows the speed of each device, judges the
proposals beside the plan that runs. That is repeated as long as plans get better.

PipeDream's authors name it as a limit of their work that a plan is made only once, from a profile
(Narayanan et al. 2019).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anabranch.cluster import Cluster
from anabranch.errors import AnabranchError
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.profile.profile import Profile
from anabranch.solve.schedule_choice import scheduled
from anabranch.solve.search import plan as search
from anabranch.solve.settings import SETTINGS
from anabranch.solve.simulation import checked_run, foreseen, simulate
from anabranch.timeline import Timeline

_Pass = tuple[int, bool]
"""(stage, True for its forward)"""


@dataclass(frozen=True)
class Measured:
    """Measurements of the plan that a run executes.

    Attributes:
        timelines: timelines of some steps.
        yardstick_s: seconds of the same piece of work on each rank, done at the same time.
    """

    timelines: tuple[Timeline, ...]
    yardstick_s: tuple[float, ...]

    def slower(self, devices: Sequence[int]) -> dict[int, float]:
        """Device -> how many times as long it computes as the median; empty if about equal."""
        usual = statistics.median_low(self.yardstick_s)
        ratios = [seconds / usual for seconds in self.yardstick_s]
        if max(ratios) < (1 + SETTINGS.even) * min(ratios):
            return {}
        return dict(zip(devices, ratios, strict=True))


@dataclass(frozen=True)
class Change:
    """Another plan, and its gain.

    Attributes:
        now_s, then_s: predicted seconds of a step in a row, of the plan that runs and of the other
            one, by the corrected profile.
        search_s: seconds of the search for it.
    """

    plan: Plan
    now_s: float
    then_s: float
    search_s: float = 0.0

    @property
    def gain_s(self) -> float:
        return self.now_s - self.then_s

    def repays(self, steps: int, cost_s: float) -> bool:
        """Return True if the gain exceeds errors of prediction and ``steps`` repay the cost."""
        return self.gain_s > SETTINGS.worth * self.now_s and self.gain_s * steps > cost_s


@dataclass(frozen=True)
class Replanner:
    """Looks for a better plan in the middle of a run; called on one rank.

    Attributes:
        options: options of the search, arguments of ``solve.plan``.
    """

    profile: Profile
    cluster: Cluster
    options: Mapping[str, Any]

    def expected(self, plan: Plan) -> Timeline:
        return simulate(plan, self.profile, self.cluster)

    def most_gain_s(self, plan: Plan, measured: Measured) -> float:
        """Return the most seconds of a step that any plan could gain: if all devices were always
        busy, each with work in proportion to its speed.
        """
        devices = plan.stage_graph.devices
        slower = measured.slower(devices) or dict.fromkeys(devices, 1.0)
        step_s = statistics.median(timeline.step_s for timeline in measured.timelines)
        work_s = statistics.median(
            sum(seconds / slower[device] for device, seconds in timeline.busy_s.items())
            for timeline in measured.timelines
        )
        return max(step_s - work_s / sum(1.0 / times for times in slower.values()), 0.0)

    def change(self, plan: Plan, measured: Measured) -> Change:
        """Search for the best plan, which may be the one that runs."""
        began = time.perf_counter()
        slower = measured.slower(plan.stage_graph.devices)
        profile = self._corrected(plan, measured, slower)
        best, best_s = plan, self._step_s(plan, profile, slower)
        now_s = best_s
        for turn in range(SETTINGS.turns if slower else 1):
            before_s = best_s
            for proposal in self._proposals(best, profile, slower, anew=turn == 0):
                seconds = self._step_s(proposal, profile, slower)
                if seconds < best_s:
                    best, best_s = proposal, seconds
            if best_s == before_s:
                break
        if best is not plan:
            best = foreseen(best, profile, self.cluster)[0]
        return Change(best, now_s, best_s, time.perf_counter() - began)

    def _proposals(
        self, plan: Plan, profile: Profile, slower: Mapping[int, float], *, anew: bool
    ) -> Iterator[Plan]:
        """Generate proposals that begin with a plan, and with ``anew`` also some without."""
        size, devices = plan.stage_graph.batch_size, len(plan.stage_graph.devices)
        slowed = _scaled(profile, plan, _by_device(plan, slower)) if slower else profile
        # Devices keep to one stage where they have one: several gain less than a change costs.
        search_options: dict[str, object] = {**(self.options.get("planner_options") or {})}
        search_options.setdefault("several", plan.stage_graph.shares_devices)
        options = {**self.options, "planner_options": search_options}
        for start in (plan, None) if anew else (plan,):
            with suppress(AnabranchError):
                other = search(slowed, self.cluster, size, start=start, **options)
                if len(other.stage_graph.devices) == devices:  # ranks stay
                    other = replace(other, model=plan.model, options=plan.options)
                    yield other
                    if slower:
                        yield self._arranged(other, profile, slower)
        if slower and anew:
            yield self._arranged(plan, profile, slower)

    def _arranged(self, plan: Plan, profile: Profile, slower: Mapping[int, float]) -> Plan:
        """Return the plan with its busiest stages on the fastest devices."""
        graph = plan.stage_graph
        busy = simulate(plan, profile, self.cluster).busy_s
        by_load = sorted(graph.devices, key=lambda device: -busy[device])
        by_speed = sorted(graph.devices, key=lambda device: slower.get(device, 1.0))
        to = dict(zip(by_load, by_speed, strict=True))
        stages = tuple(
            replace(stage, devices=tuple(sorted(to[device] for device in stage.devices)))
            for stage in graph.stages
        )
        return replace(plan, stage_graph=replace(graph, stages=stages))

    def _step_s(self, plan: Plan, profile: Profile, slower: Mapping[int, float]) -> float:
        """Return the seconds of a step in a row of steps."""
        cost = prices_of(plan, profile, self.cluster)
        timeline = checked_run(*scheduled(plan, cost), cost, slower)
        return timeline.period_s or timeline.step_s

    def _corrected(self, plan: Plan, measured: Measured, slower: Mapping[int, float]) -> Profile:
        """Return the profile with times of operators corrected by the times of their stages."""
        ratios = _ratios(measured.timelines, self.expected(plan), slower)
        return _scaled(self.profile, plan, ratios)


def _scaled(profile: Profile, plan: Plan, times: Mapping[_Pass, float]) -> Profile:
    """Multiply the seconds of operators by the factors of their stages in a plan."""
    factors = np.ones((2, len(profile.graph), 1))
    for s, stage in enumerate(plan.stage_graph.stages):
        ops = [profile.graph.index[name] for name in stage.operators]
        factors[:, ops, 0] = [[times.get((s, way), 1.0)] for way in (True, False)]
    return profile.scaled(factors)


def _by_device(plan: Plan, slower: Mapping[int, float]) -> dict[_Pass, float]:
    """Return the slowness of the slowest device of each stage, for both passes."""
    return {
        (s, is_forward): max(slower.get(device, 1.0) for device in stage.devices)
        for s, stage in enumerate(plan.stage_graph.stages)
        for is_forward in (True, False)
    }


def _ratios(
    measured: Sequence[Timeline], predicted: Timeline, slower: Mapping[int, float]
) -> dict[_Pass, float]:
    """Return measured over predicted seconds of each pass, without the slowness of its device."""
    expected = {
        (span.device, str(span.action)): span.end - span.start
        for span in predicted.spans
        if span.action.kind.is_compute
    }
    ratios: dict[_Pass, list[float]] = defaultdict(list)
    for timeline in measured:
        for span in timeline.spans:
            seconds = expected.get((span.device, str(span.action)))
            if seconds:
                ratio = (span.end - span.start) / seconds / slower.get(span.device, 1.0)
                ratios[span.action.stage, span.action.kind.is_forward].append(ratio)
    return {key: statistics.median(values) for key, values in ratios.items()}
