"""Where a rank is, for others to read."""

from __future__ import annotations

from anabranch.runtime.guards.position import POSITION_INTS, Phase, Position, waits
from anabranch.schedule.schedule import Action, Kind


def test_a_position_reads_as_a_sentence() -> None:
    """Before, inside and after the actions of a step."""
    position = Position()
    assert str(position) == ""
    position.begin(3)
    assert str(position) == "in step 3"
    position.enter(3, Action(1, Kind.FORWARD, 2))
    assert str(position) == "in the forward of stage 1, micro-batch 2, step 3"
    position.enter(3, Action(1, Kind.RECEIVE_BACKWARD, 0, 2, 2, 0, 4))
    assert str(position) == "waiting for gradients of stage 1, micro-batch 0, step 3"
    position.leave()
    assert str(position) == ""


def test_a_mini_batch_without_a_flush_is_called_so() -> None:
    """Until a step begins again."""
    position = Position()
    position.begin(3, is_minibatch=True)
    assert str(position) == "in mini-batch 3"
    position.enter(4, Action(1, Kind.BACKWARD, 2))
    assert str(position) == "in the backward of stage 1, micro-batch 2, mini-batch 4"
    position.begin(0)
    assert str(position) == "in step 0"


def test_a_shared_position_is_seen_elsewhere() -> None:
    """The parent of local ranks reads the same integers."""
    memory = memoryview(bytearray(8 * POSITION_INTS)).cast("q")
    position = Position()
    position.share(memory)
    position.enter(5, Action(2, Kind.BACKWARD, 1))
    assert memory.tolist()[:3] == [5, 2, 1]


def test_a_phase_is_told_with_its_step_and_ends() -> None:
    """Also inside of another one."""
    position = Position()
    with position.doing(Phase.DATA):
        assert str(position) == "reading data"
    assert str(position) == ""
    position.begin(3, is_minibatch=True)
    with position.doing(Phase.SAVE):
        assert str(position) == "saving a checkpoint, mini-batch 3"
        with position.doing(Phase.SUMS):
            assert str(position) == "waiting for the sums of all ranks, mini-batch 3"
    assert str(position) == "in mini-batch 3"


def test_who_waits_for_others() -> None:
    """Receives and sums, not what a rank does itself."""
    position = Position()
    position.enter(5, Action(2, Kind.BACKWARD, 1))
    assert not waits(position.numbers)
    position.enter(5, Action(2, Kind.RECEIVE_FORWARD, 1, 1, 1, 0, 4))
    assert waits(position.numbers)
    position.begin(5, Phase.SUMS)
    assert waits(position.numbers)
    position.begin(5, Phase.UPDATE)
    assert not waits(position.numbers)
