"""Which rank is named, and when."""

import pytest

from anabranch.runtime.guards.heartbeat import Watch, default_timeout_s
from anabranch.runtime.guards.position import Phase, Position
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.schedule.schedule import Action, Kind

FORWARD = Action(1, Kind.FORWARD, 3)
WAITS = Action(0, Kind.RECEIVE_BACKWARD, 2, 1, 1, 0, 4)


def at(what: Action | Phase, step: int = 7, *, settled: bool = True) -> list[int]:
    """A position; the clock of the machine is left out, so that equal ones are equal."""
    position = Position()
    if settled:
        position.settle()
    if isinstance(what, Action):
        position.begin(step)
        position.enter(step, what)
    else:
        position.begin(-1 if what in (Phase.OUTSIDE, Phase.START_UP) else step, what)
    return [*position.numbers[:-1], 0]


def sums() -> list[int]:
    """The position of a rank that waits for the sums of all."""
    position = Position()
    position.settle()
    position.begin(7, Phase.TOTALS)
    with position.waiting():
        return [*position.numbers[:-1], 0]


def found(*ranks: list[int], now: float, timeout_s: float = 5.0, **options: object) -> str:
    """Of ranks that were first seen so at 0 s, 1 s, 2 s ..., and since then did not go on."""
    watch = Watch(len(ranks), timeout_s)
    for rank, position in enumerate(ranks):
        watch.note(rank, position, float(rank))
        watch.note(rank, position, now)
    return problem(watch, now, **options)


def problem(watch: Watch, now: float, **options: object) -> str:
    """As text; empty if there is none."""
    return str(watch.problem(now, **options) or "")


def test_the_rank_that_others_wait_for_is_named_first():
    """With what it does; victims are one line."""
    told = found(at(WAITS), at(FORWARD), sums(), now=8.0)
    assert told.startswith(
        "rank 1 has not gone on for 7.0 s: in the forward of stage 1, micro-batch 3, step 7; "
        "waiting: ranks 0, 2. A rank may be silent for 5 s"
    )


def test_a_loader_that_blocks_is_named():
    told = found(at(WAITS), at(Phase.DATA), now=8.0)
    assert told.startswith(
        "rank 1 has not gone on for 7.0 s: reading data, step 7; waiting: rank 0"
    )


def test_if_all_wait_the_one_that_stopped_first_is_named():
    """Behind a cut link nobody does anything else."""
    assert found(sums(), at(WAITS), now=9.0).startswith("rank 0 has not")


def test_a_process_that_is_stopped_is_named_though_others_go_on():
    """Soon: nothing that it may be doing would explain that."""
    ranks = at(Phase.START_UP, settled=False), at(Phase.START_UP, settled=False)
    assert found(*ranks, now=8.0) == ""
    told = found(*ranks, now=8.0, silent=[1])
    assert told.startswith("rank 1 has not gone on for 7.0 s: its process is stopped or does not")
    assert "rank 0 is in start-up" in told
    assert found(*ranks, now=4.0, silent=[1]) == ""


@pytest.mark.parametrize(
    "slow",
    [
        at(Phase.START_UP, settled=False),
        at(FORWARD, 0, settled=False),
        at(Phase.DATA, 0, settled=False),
        at(Phase.EVALUATION),
        at(Phase.SAVE),
    ],
)
def test_what_may_take_long_is_no_stall_before_its_own_limit(slow: list[int]):
    """A first step compiles, an evaluation has code of its own, a file may be large."""
    assert found(sums(), slow, now=TIMEOUTS.patience_s) == ""
    assert found(sums(), slow, now=TIMEOUTS.patience_s + 2).startswith("rank 1 has not")


def test_who_goes_on_holds_nobody_up():
    """One that computes, and those that have just begun to wait for it."""
    watch = Watch(2, 5.0)
    for now in (0.0, 3.0, 6.0, 9.0):
        watch.note(0, at(WAITS), 0.0)
        watch.note(1, at(FORWARD, int(now)), now)
    assert problem(watch, 10.0) == ""
    assert problem(watch, 15.0).startswith("rank 1")


def test_what_the_user_does_between_steps_is_nobody_s_business():
    """Nor is a rank that has ended."""
    assert found(at(Phase.OUTSIDE), at(Phase.OUTSIDE), now=100.0) == ""
    watch = Watch(2, 5.0)
    watch.note(0, at(FORWARD), 0.0)
    watch.note(0, at(FORWARD), 1.0, is_done=True)
    assert problem(watch, 100.0) == ""


def test_who_waited_for_a_rank_that_has_ended_has_time_to_notice():
    """A rank that took long over its evaluation gives its sums, and ends at once."""
    watch = Watch(2, 5.0)
    watch.note(0, at(WAITS), 0.0)
    watch.note(1, at(Phase.EVALUATION), 0.0)
    watch.note(1, at(Phase.EVALUATION), 20.0, is_done=True)
    watch.note(1, at(Phase.EVALUATION), 21.0, is_done=True)
    assert problem(watch, 24.0) == ""
    assert problem(watch, 26.0).startswith("rank 0")


def test_the_default_grows_with_the_predicted_step():
    assert default_timeout_s(0.001) == 60
    assert default_timeout_s(3.0) == 300


def waiting(phase: Phase) -> list[int]:
    """A rank that waits for others in a phase."""
    position = Position()
    position.settle()
    position.begin(7, phase)
    with position.waiting():
        return [*position.numbers[:-1], 0]


def test_who_waits_between_steps_or_in_an_update_is_a_victim():
    """They were blamed in place of the rank that they wait for."""
    told = found(waiting(Phase.OUTSIDE), waiting(Phase.UPDATE), at(FORWARD), now=9.0)
    assert told.startswith("rank 2 has not gone on for 7.0 s: in the forward of stage 1")
    assert "waiting: ranks 0, 1" in told
    told = found(waiting(Phase.SAVE), at(Phase.OUTSIDE), now=9.0)
    assert told.startswith("rank 1 has not gone on for 8.0 s: outside of the steps")


def test_all_ranks_that_wait_between_steps_are_a_stall():
    assert found(waiting(Phase.OUTSIDE), waiting(Phase.OUTSIDE), now=9.0).startswith("rank 0")


@pytest.mark.parametrize("phase", [Phase.START_UP, Phase.EVALUATION, Phase.HELD_OUT, Phase.SAVE])
def test_the_user_may_have_less_patience(phase: Phase):
    """First steps and the like then have the limit of all others."""
    for slow in (at(phase), at(FORWARD, 0, settled=False)):
        watch = Watch(2, 5.0, patience=5.0)
        watch.note(0, sums(), 0.0)
        watch.note(1, slow, 0.0)
        assert problem(watch, 4.0) == ""
        told = problem(watch, 6.0)
        assert told.startswith("rank 1 has not gone on for 6.0 s")
        assert told.endswith("A rank may be silent for 5 s (--timeout)")
