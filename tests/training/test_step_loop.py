"""Which of the recorded steps stands for all."""

from itertools import repeat
from types import SimpleNamespace

import torch

from anabranch.timeline import Timeline
from anabranch.training.reporter import TrainingClock
from anabranch.training.step_loop import StepLoop


class _Pipe(SimpleNamespace):
    """Steps of so many seconds each, as their timelines have it."""

    def step(self, batch: object, *, record: bool, weigh: bool) -> float:
        self.timeline = Timeline((), (0,), "measured", self.seconds.pop(0), {}) if record else None
        return 0.0


def test_the_median_of_all_recorded_steps_is_shown():
    """Three steps are too few where ranks share cores: those of looks before count as well, until
    there is another plan. Who compares ranks at a look takes its own.
    """
    pipe = _Pipe(seconds=[8.0, 9.0, 7.0, 1.0, 3.0, 2.0])
    pipe.plan = SimpleNamespace(stage_graph=SimpleNamespace(batch_size=2))
    reporter = SimpleNamespace(noted=iter, add=lambda loss, seconds: None)
    loop = StepLoop(pipe, reporter, TrainingClock(), repeat({"x": torch.zeros(2)}))
    assert loop.alone(4)  # the first is not recorded: it sets things up
    assert loop.timeline.step_s == 8.0
    assert loop.alone(3)
    assert [timeline.step_s for timeline in loop.recorded] == [1.0, 3.0, 2.0]
    assert loop.timeline.step_s == 7.0
    loop.begin_anew()
    assert loop.timeline is None
