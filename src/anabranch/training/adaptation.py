"""Looks in the middle of training: what devices and links take, and whether another plan is better.

::

    steps   1 .. 5   6 ......... 105   106 .. 108   109 .........       in a row, but for looks
                   look                          look
                     slow: device 1                better plan: state moves, training goes on
"""

from __future__ import annotations

import statistics
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass

from anabranch.errors import AnabranchError, InfeasiblePlanError
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
"""Steps in a row between two looks at what devices and links take. Each look has ``RECORDED_STEPS``
steps with a barrier, so more looks would notice sooner and cost more: these three are less than 1 %
where filling the pipeline takes a third of a step.
"""


@dataclass(frozen=True)
class Looks:
    """Looks in the middle of training at what devices and links take, beside what was predicted.

    Attributes:
        every: steps between two of them; None for none.
        replans: whether training changes to another plan where that repays.
        replanner: knows the prediction; only the first rank needs to have one.
    """

    every: int | None = LOOK_EVERY
    replans: bool = False
    replanner: Replanner | None = None

    def steps_until(self, done: int, accumulate: int) -> int | None:
        """Count the steps in a row until those that are recorded for the next look, which end with
        an update: nothing else can be between two plans.
        """
        if self.every is None:
            return None
        return self.every + -(done + self.every + RECORDED_STEPS) % accumulate


class Adaptation:
    """Reaction of a run to its looks; all ranks take part, the first decides.

    After a change the next look shows whether steps have become shorter. If not, the plan before
    comes back, and stays.

    Args:
        start_s: seconds that the pipeline took to be made: what another plan will take, roughly.

    Attributes:
        slow: what was slower than predicted at the last look.
        changes: of the plan, as text.
    """

    def __init__(self, loop: StepLoop, looks: Looks, start_s: float) -> None:
        self.slow: tuple[str, ...] = ()
        self.changes: list[str] = []
        self._loop, self._looks, self._change_s = loop, looks, start_s
        self._expected: tuple[Plan, Timeline] | None = None
        self._before: tuple[Plan, float] | None = None
        self._settled_s = 0.0  # of a step for which no better plan was found
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
        """Note what is slow; False where nothing is predicted of the plan, or devices take turns on
        the cores of a host: who waits for a core takes longer there, and is not slow.
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
                warnings.warn(text, stacklevel=2)
            return
        self._change_s = time.perf_counter() - began
        predicted_s = None if plan.predicted is None else plan.predicted.step_s
        self.changes.append(f"step {step}: {why}")
        loop.begin_anew()
        self.slow = ()
        loop.reporter.tell(PlanEvent(step, why, predicted_s, plan))
        loop.alone(1 + RECORDED_STEPS)

    def _decide(self, replanner: Replanner, measured: Measured) -> tuple[Plan | None, str]:
        """The plan to change to, and why; on the first rank."""
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
