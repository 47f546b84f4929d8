"""Looks in the middle of training at the times of devices and links, and for a better plan.

::

    steps   1 .. 5   6 ......... 105   106 .. 108   109 .........       in a row except for looks
                   look                          look
                     slow: device 1                better plan: state moves, training goes on
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass

from anabranch.errors import AnabranchError, InfeasiblePlanError, warn
from anabranch.files import plan_from_dict, plan_to_dict
from anabranch.plans.plan import Plan
from anabranch.record import RECORDED_STEPS
from anabranch.runtime.guards.position import POSITION, Phase
from anabranch.solve.replanning import Measured, Replanner
from anabranch.solve.settings import SETTINGS
from anabranch.solve.stragglers import stragglers
from anabranch.timeline import Timeline
from anabranch.training.events import LookEvent, PlanEvent
from anabranch.training.step_loop import StepLoop

LOOK_EVERY = 100
"""Steps in a row between two looks. Each look has ``RECORDED_STEPS`` steps with a barrier, so more
looks would notice sooner and cost more: three steps are less than 1 % if filling the pipeline takes
a third of a step.
"""


@dataclass(frozen=True)
class Looks:
    """Comparison of the times of devices and links with the prediction, in the middle of training.

    Attributes:
        every: steps between two looks; None for no looks.
        replans: whether training changes to another plan where that repays.
        replanner: source of predictions and plans; only the first rank needs to have one.
    """

    every: int | None = LOOK_EVERY
    replans: bool = False
    replanner: Replanner | None = None

    def steps_until(self, done: int, accumulate: int) -> int | None:
        """Return the steps in a row up to the recorded steps of the next look. These end with an
        update, as plans can only change between updates.
        """
        if self.every is None:
            return None
        return self.every + -(done + self.every + RECORDED_STEPS) % accumulate


class Adaptation:
    """Reaction of a run to its looks; all ranks take part, the first decides.

    After a change the next look shows whether steps have become shorter. If not, the previous plan
    comes back, and stays.

    Args:
        start_s: seconds in which the pipeline was made: about as long as a change of plan takes.

    Attributes:
        slow: devices and links that were slower than predicted at the last look, as text.
        changes: changes of the plan, as text.
    """

    def __init__(self, loop: StepLoop, looks: Looks, start_s: float) -> None:
        self.slow: tuple[str, ...] = ()
        self.changes: list[str] = []
        self._loop, self._looks, self._change_s = loop, looks, start_s
        self._expected: tuple[Plan, Timeline] | None = None
        self._before: tuple[Plan, float] | None = None
        self._settled_s = 0.0  # seconds of a step for which the search had no better plan
        self._is_over = not looks.replans

    def look(self) -> None:
        """Compare, and change the plan if that repays."""
        loop, pipe = self._loop, self._loop.pipe
        if not loop.recorded:
            return
        replanner = self._looks.replanner if pipe.rank == 0 else None
        if replanner is not None and self._compare(replanner):
            loop.reporter.tell(LookEvent(pipe.step_number, self.slow))
        if self._is_over or not pipe.is_between_updates:
            return
        measured = Measured(tuple(loop.recorded), pipe.yardstick_s())
        with POSITION.doing(Phase.MOVE):
            chosen, why = None, ""
            if replanner is not None:
                with suppress(AnabranchError):
                    chosen, why = self._decide(replanner, measured)
            document = None if chosen is None else plan_to_dict(chosen)
            decision = [document, why, self._is_over]
            document, why, self._is_over = pipe.from_first(decision)
        if document is not None:
            self._change(chosen or plan_from_dict(document), why)

    def _compare(self, replanner: Replanner) -> bool:
        """Note slow devices and links. Return False if the plan has no prediction, or devices share
        the cores of a host: waiting for a core does not make a device slow.
        """
        loop, plan = self._loop, self._loop.pipe.plan
        if replanner.cluster.shared_cores:
            return False
        # A plan that does not suit this machine runs all the same.
        with suppress(AnabranchError):
            if self._expected is None or self._expected[0] is not plan:
                self._expected = plan, replanner.expected(plan)
            self.slow = tuple(map(str, stragglers(loop.recorded, self._expected[1])))
            return True
        return False

    def _change(self, plan: Plan, why: str) -> None:
        loop = self._loop
        step = loop.pipe.step_number
        began = time.perf_counter()
        try:
            loop.pipe.change_plan(plan)
        except InfeasiblePlanError as error:  # on every rank
            self._is_over = True
            if loop.pipe.rank == 0:
                text = f"training goes on under the plan that it has; a better one is left: {error}"
                warn(text)
            return
        self._change_s = time.perf_counter() - began
        predicted_s = None if plan.predicted is None else plan.predicted.step_s
        self.changes.append(f"step {step}: {why}")
        loop.begin_anew()
        self.slow = ()
        loop.reporter.tell(PlanEvent(step, why, predicted_s, plan))
        loop.alone(1 + RECORDED_STEPS)

    def _decide(self, replanner: Replanner, measured: Measured) -> tuple[Plan | None, str]:
        """Return the plan to change to, if any, and the reason; on the first rank."""
        loop, pipe = self._loop, self._loop.pipe
        step_s = statistics.median(timeline.step_s for timeline in measured.timelines)
        if self._before is not None:
            before, before_s = self._before
            self._before = None
            if step_s > before_s:
                self._is_over = True
                now = f"a step took {step_s * 1e3:.4g} ms, and {before_s * 1e3:.4g} ms before"
                return before, f"back to the plan before, for {now}"
        if abs(step_s - self._settled_s) < SETTINGS.worth * step_s:
            return None, ""
        done, total = len(loop.reporter.losses), loop.reporter.total
        # A run without a known end is taken to be half done.
        left = done if total is None else total - done
        if replanner.most_gain_s(pipe.plan, measured) * left < self._change_s:
            return None, ""
        change = replanner.change(pipe.plan, measured)
        if not change.repays(left, self._change_s):
            self._settled_s = step_s
            return None, ""
        self._before = pipe.plan, step_s
        return change.plan, (
            f"a plan with a step of {change.then_s * 1e3:.4g} ms in place of "
            f"{change.now_s * 1e3:.4g} ms by prediction, found in {change.search_s:.1f} s"
        )
