"""Which failure is told, and how."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import NonFiniteError, StageFailedError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.runtime.guards.failure import Failure, PeerLostError, located, one_line
from anabranch.runtime.guards.position import POSITION
from anabranch.schedule.schedule import Action, Kind
from tests.graph.chain import run_stages
from tests.graph.nets import one_stage
from tests.runtime.training import on_one_device


def test_what_is_raised_inside_says_where() -> None:
    POSITION.enter(3, Action(1, Kind.BACKWARD, 2))
    try:
        with (
            pytest.raises(
                StageFailedError, match=r"rank 7 .* backward of stage 1, .*ValueError: no"
            ),
            located(7),
        ):
            raise ValueError("no")
    finally:
        POSITION.leave()


class Looks(nn.Module):
    """Looks words up in a table, after another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(2, 3), nn.Embedding(4, 3)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found = self.table(words)
        return (self.first(x) * found).mean()


def test_the_operation_that_raises_is_named() -> None:
    """By the module that calls it and the line there, whatever else the stage computes."""
    batch = (torch.ones(4, 2), torch.tensor([0, 1, 2, 3]))
    captured = capture(Looks(), batch)
    stages = split(captured, one_stage(captured))
    run_stages(stages, batch)
    named = (
        r"IndexError: index out of range in self; table calls it, at .*_failure\.py:\d+ \(found ="
    )
    with pytest.raises(StageFailedError, match=named), located(0):
        run_stages(stages, (batch[0], batch[1] + 1))


class Weighs(nn.Module):
    """Weighs words by their counts in the batch, which the whole batch tells."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(2, 3)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        counts = torch.bincount(words, minlength=3)
        return F.cross_entropy(self.scores(x), words, weight=1 / counts.clamp(min=1))


class Deals(Weighs):
    """Deals samples out by the counts of their words, inside a stage."""

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        counts = torch.bincount(words, minlength=3)
        parts = x[words.argsort()].split(counts.tolist())
        return torch.cat([self.scores(part) for part in parts]).mean()


@pytest.mark.parametrize("kind", [Weighs, Deals])
def test_an_operation_that_the_runtime_calls_otherwise_is_named(kind: type[nn.Module]) -> None:
    """Outside of a stage's graph, and by a method: here of a word beyond those that are counted."""

    def make(samples: int, word: int = 0) -> tuple[Tensor, Tensor]:
        return torch.ones(samples, 2), torch.full((samples,), word)

    _, pipeline = on_one_device(kind(), make)
    named = r"shape '\[3\]' is invalid .*; the model calls it, at .*_failure\.py:\d+ \(counts ="
    with pytest.raises(StageFailedError, match=named):
        pipeline.step(make(8, 3))


def test_an_update_inside_the_backward_is_named() -> None:
    """Torch tells that a variable was modified, not by whom; the model may have done it as well."""
    weight = torch.ones(2, requires_grad=True)
    loss, other = [(weight.square() * x).sum() for x in (1.0, 2.0)]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss.backward()
    said = r"if a hook updates .* leave it out, the optimizer of the"
    with pytest.raises(StageFailedError, match=said), located(0):
        other.backward()


def test_our_own_errors_pass() -> None:
    with pytest.raises(NonFiniteError, match=r"^as it is$"), located(0):
        raise NonFiniteError("as it is")


def test_a_lost_peer_stays_a_consequence() -> None:
    """It is told only if no cause turns up."""
    with pytest.raises(PeerLostError) as caught, located(3):
        raise PeerLostError("gone")
    assert Failure.of(caught.value, 3).is_consequence
    assert not Failure.of(ValueError(), 3).is_consequence


def test_a_collective_of_the_user_that_breaks_is_a_consequence() -> None:
    """torch raises a plain RuntimeError there."""
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:8852")
    assert Failure.of(broken, 1).is_consequence
    assert not Failure.of(RuntimeError("shapes do not match"), 1).is_consequence


def test_a_failure_becomes_an_exception_of_its_class_again() -> None:
    """With the traceback as a note; an exception that is not ours becomes a StageFailedError."""
    ours = Failure(1, "NonFiniteError", "text", "where it was", False).exception()
    assert type(ours) is NonFiniteError
    assert ours.__notes__ == ["Traceback of rank 1:\nwhere it was"]
    assert type(Failure(1, "ZeroDivisionError", "text", "", False).exception()) is StageFailedError


def test_a_long_message_is_cut() -> None:
    assert one_line(ValueError("a\n b")) == "ValueError: a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 5000))) < 700
