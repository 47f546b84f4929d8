"""Where a rank is, for others to read."""

from anabranch.runtime.guards.position import POSITION_INTS, Phase, Position, waits
from anabranch.schedule.schedule import Action, Kind


def test_a_position_reads_as_a_sentence() -> None:
    """Before, inside and after the actions of a step."""
    position = Position()
    assert str(position) == "outside of the steps"
    position.begin(3)
    assert str(position) == "in step 3"
    position.enter(3, Action(1, Kind.FORWARD, 2))
    assert str(position) == "in the forward of stage 1, micro-batch 2, step 3"
    position.enter(3, Action(1, Kind.RECEIVE_BACKWARD, 0, 2, 2, 0, 4))
    assert str(position) == "waiting for gradients of stage 1, micro-batch 0, step 3"
    position.leave()
    assert str(position) == "outside of the steps"


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
    assert str(position) == "outside of the steps"
    position.begin(3, is_minibatch=True)
    with position.doing(Phase.SAVE):
        assert str(position) == "saving a checkpoint, mini-batch 3"
        with position.doing(Phase.TOTALS), position.waiting():
            assert str(position) == "waiting for the sums of all ranks, mini-batch 3"
    assert str(position) == "in mini-batch 3"


def test_who_waits_for_others() -> None:
    """Receives and sums, not what a rank does itself."""
    position = Position()
    position.enter(5, Action(2, Kind.BACKWARD, 1))
    assert not waits(position.numbers)
    position.enter(5, Action(2, Kind.RECEIVE_FORWARD, 1, 1, 1, 0, 4))
    assert waits(position.numbers)
    position.begin(5, Phase.TOTALS)
    with position.waiting():
        assert waits(position.numbers)
    position.begin(5, Phase.UPDATE)
    assert not waits(position.numbers)


def test_a_rank_waits_whatever_else_it_is_at() -> None:
    """In phases, in actions and between steps; the sums of a step have a text of their own."""
    position = Position()
    for phase, text in (
        (Phase.OUTSIDE, "waiting for other ranks, step 5"),
        (Phase.UPDATE, "in the update, waiting for other ranks, step 5"),
        (Phase.EVALUATION, "in the evaluation, waiting for other ranks, step 5"),
        (Phase.TOTALS, "waiting for the sums of all ranks, step 5"),
    ):
        position.begin(5, phase)
        assert not waits(position.numbers)
        with position.waiting(), position.waiting():
            assert waits(position.numbers)
            assert str(position) == text
        assert not waits(position.numbers)
    position.begin(5)
    position.enter(5, Action(1, Kind.FORWARD, 2))
    with position.waiting():
        assert waits(position.numbers)
        assert str(position).endswith("micro-batch 2, waiting for other ranks, step 5")
    assert str(position) == "in the forward of stage 1, micro-batch 2, step 5"
    position.enter(5, Action(1, Kind.RECEIVE_BACKWARD, 0, 2, 2, 0, 4))
    with position.waiting():
        assert str(position) == "waiting for gradients of stage 1, micro-batch 0, step 5"


def test_an_action_of_an_evaluation_says_so() -> None:
    """It was told as one of training, and its data as that of training."""
    position = Position()
    position.begin(3, Phase.EVALUATION)
    position.enter(3, Action(1, Kind.FORWARD, 2))
    assert str(position) == ("in the forward of stage 1, micro-batch 2, in the evaluation, step 3")
    position.begin(3, Phase.HELD_OUT)
    assert str(position) == "reading held-out data, step 3"
