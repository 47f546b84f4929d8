"""Events in the order of their steps."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from anabranch.errors import TrainingError
from anabranch.training import EvaluationEvent, Event
from anabranch.training.reporter import Reporter
from tests.runtime.small import batch


def pipe(rank: int = 0) -> SimpleNamespace:
    """As much of a pipeline as a reporter looks at, after 20 steps."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)
    return SimpleNamespace(
        rank=rank, step_number=20, epoch=3, optimizer=optimizer, metrics={"m": 1.0},
        failing=nullcontext,
    )  # fmt: skip


def test_what_was_done_between_steps_waits_for_the_loss_of_its_step():
    """Two batches are read before the first loss is known; each step is told as it was when its
    batch was read.
    """
    seen: list[Event] = []
    under_way = pipe()
    reporter = Reporter(under_way, 9, [seen.append], 20)
    batches = reporter.noted([batch(4), batch(3)])
    next(batches)
    under_way.epoch, under_way.optimizer.param_groups[0]["lr"] = 4, 0.25
    next(batches)
    reporter.tell(EvaluationEvent(22, {}, 0.0))
    reporter.add(7.0, 1.0)
    assert [(e.name, e.step) for e in seen] == [("step", 21)]
    reporter.add(6.0, 1.0)
    assert [(e.name, e.step) for e in seen[1:]] == [("step", 22), ("evaluation", 22)]
    first, second = seen[:2]
    assert (first.done, first.total, first.samples, first.epoch) == (1, 9, 4, 3)
    assert (second.done, second.samples, second.epoch) == (2, 3, 4)
    assert (first.learning_rate, second.learning_rate) == (0.5, 0.25)
    assert reporter.losses == [7.0, 6.0]


def test_a_callback_that_raises_is_named():
    """With the event and the line; on other ranks nothing is called."""

    def careless(event: Event) -> None:
        raise KeyError("colour")

    for rank in (1, 0):
        reporter = Reporter(pipe(rank), None, [careless], 20)
        next(reporter.noted([batch(4)]))
        if rank == 1:
            reporter.add(1.0, 1.0)
            continue
        with pytest.raises(TrainingError, match=r"careless raised at the step event of step 21.*"):
            reporter.add(1.0, 1.0)
