"""The second call of a module, which says what the first one said."""

import random

import pytest
from torch import Tensor, nn

from anabranch.errors import TrainingError
from anabranch.verification import verify
from tests.losses import Mean, Tokens, batch
from tests.runtime.training import LIMIT_S, on_one_device


class Counting(Tokens):
    """A counter in Python."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        return self.scores(x).square().mean() * self.calls


class Drawing(Tokens):
    """A random number of Python's."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x).square().mean() * random.random()


class Remembering(Mean):
    """Sets an attribute that changes nothing, yet."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y, label)


@pytest.mark.parametrize("module", [Counting, Drawing])
def test_what_python_changes_from_call_to_call_is_refused(module: type[nn.Module]) -> None:
    """Before the first step of training, and by verify, also with one micro-batch."""
    workload, pipeline = on_one_device(module(), batch)
    with pytest.raises(TrainingError, match="at its second call"):
        pipeline.step(batch(8))
    with pytest.raises(TrainingError, match="at its second call"):
        verify(workload, 1, batch=batch(2), timeout=LIMIT_S)


def test_what_a_forward_sets_is_told() -> None:
    """It may matter later, and the captured model does not have it."""
    _, pipeline = on_one_device(Remembering(), batch)
    with pytest.warns(UserWarning, match="Remembering sets calls"):
        pipeline.step(batch(8))
