"""When messages arrive and all-reduces start, by the rules of the simulator."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cost.communication import Route
from anabranch.emulation.shared_links import POSTED, SENT, SharedLinks
from anabranch.runtime.transport import Channel
from anabranch.simulator.sums import Sum

AB, AC = Channel(0, 1, 0), Channel(0, 2, 0)


def summed(ranks: int, seconds: float) -> Sum:
    """A sum of one queue, on port 0."""
    return Sum(0, (0,), (0,), (0, 1, 2), ranks, 4, seconds, (0,))


def shared_links(sums: Sequence[Sum] = ()) -> SharedLinks:
    """Two channels out of rank 0 with two messages each; port 0 is shared, 1 and 2 are not."""
    made = SharedLinks({AB: 2, AC: 2}, 3, sums)
    for rank in range(3):
        made.clear(rank)
    return made


TO_B = Route(0.5, 0.5, (0, 1)), 4
TO_C = Route(0.5, 0.5, (0, 2)), 4


@pytest.mark.parametrize("ends", [(SENT, POSTED), (POSTED, SENT)])
def test_a_message_starts_at_the_later_of_its_ends(ends):
    """Whichever of them the links learns first: it is posted at 3, moves for 2, and needs 0.5 more
    to arrive.
    """
    made = shared_links()
    for end in ends:
        made.meet(AB, 0, end, {SENT: 1.0, POSTED: 3.0}[end], *TO_B)
    assert made.arrival(AB, 0) == 5.5


def test_messages_share_a_port_one_after_another():
    """The second waits for the port, not for the latency of the first."""
    made = shared_links()
    for channel, price in ((AB, TO_B), (AC, TO_C)):
        made.meet(channel, 0, POSTED, 0.0, *price)
    made.meet(AB, 0, SENT, 1.0, *TO_B)
    made.meet(AC, 0, SENT, 1.5, *TO_C)
    assert made.arrival(AB, 0) == 3.5
    assert made.arrival(AC, 0) == 5.5


def test_a_rank_that_asks_late_finds_the_gap_of_its_time():
    """Port 0 is taken from 1 to 3 and, of a message ready at 7, to 9. One of 2 s that was ready at
    2 goes from 3 to 5; another, ready at 4, finds 5 to 7; the next none before 9.
    """
    made = shared_links()
    assert made.occupy((0,), 1.0, 2.0) == 3.0
    assert made.occupy((0,), 7.0, 2.0) == 9.0
    assert made.occupy((0,), 2.0, 2.0) == 5.0
    assert made.occupy((0,), 4.0, 2.0) == 7.0
    assert made.occupy((0,), 4.0, 2.0) == 11.0


def test_several_ports_are_taken_together():
    """Both are free from 5 on; whoever comes to port 1 in the meantime waits behind."""
    made = shared_links()
    made.occupy((0,), 0.0, 5.0)
    assert made.occupy((0, 1), 1.0, 2.0) == 7.0
    assert made.occupy((1,), 2.0, 1.0) == 8.0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=60))
def test_first_come_first_served(asked):
    """Asked for in order of time, a port serves as a queue does, however much it has to forget."""
    made, free = shared_links(), 0.0
    for at, seconds in sorted(asked, key=lambda request: request[0]):
        free = max(free, at) + seconds
        assert made.occupy((0,), float(at), float(seconds)) == free


def test_messages_of_a_channel_are_told_apart_by_number():
    """The second is posted when the first has been taken."""
    made = shared_links()
    for number, posted in ((0, 0.0), (1, 9.0)):
        made.meet(AB, number, SENT, 0.0, *TO_B)
        made.meet(AB, number, POSTED, posted, *TO_B)
    assert made.arrival(AB, 0) == 2.5
    assert made.arrival(AB, 1) == 11.5


def test_sums_go_in_turn_when_the_last_rank_has_come():
    """Gradients are final at 1, 7 and 2, so the first sum goes from 7 to 9. The second is final
    earlier, but goes after it, and after a message that takes their port at 9.
    """
    made = shared_links([summed(3, seconds=2.0), summed(1, seconds=4.0)])
    made.give(1, 0.5)
    made.give(0, 1.0)
    made.give(0, 7.0)
    assert made.ended([0, 1], 7.0) == (13.0, False)
    made.give(0, 2.0)
    assert made.ended([0, 1], 7.0) == (13.0, False)  # the second may still have to wait
    assert made.occupy((0,), 8.0, 1.0) == 10.0
    assert made.ended([0, 1], 9.0) == (14.0, True)


def test_links_that_are_cleared_knows_nothing_of_the_last_step():
    """Each rank clears what it receives."""
    made = shared_links([summed(1, seconds=1.0)])
    made.meet(AB, 0, POSTED, 50.0, *TO_B)
    made.meet(AB, 0, SENT, 50.0, *TO_B)
    made.give(0, 60.0)
    assert made.ended([0], 60.0) == (61.0, True)
    for rank in range(3):
        made.clear(rank)
    made.meet(AB, 0, SENT, 0.0, *TO_B)
    made.meet(AB, 0, POSTED, 0.0, *TO_B)
    assert made.arrival(AB, 0) == 2.5
    made.give(0, 7.0)
    assert made.ended([0], 7.0) == (8.0, True)
