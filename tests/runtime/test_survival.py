"""When a run is not worth another recovery."""

from anabranch.runtime.state.spare_copies import Recoveries


def test_a_device_whose_ranks_alone_die_is_left_out():
    """After the third time without a newer copy; one that died once is not."""
    recoveries = Recoveries()
    assert recoveries.note({1}, 10) == set()
    assert recoveries.note({0, 1}, 10) == set()
    assert recoveries.note({1}, 10) == {1}


def test_a_newer_copy_begins_the_count_anew():
    recoveries = Recoveries()
    for step in range(10):
        assert recoveries.note({1}, step) == set()


def test_failures_without_end_are_the_end():
    """Each on another device, so none of them is to blame."""
    recoveries = Recoveries()
    assert [recoveries.note({device}, -1) for device in range(6)] == [set()] * 6
    assert recoveries.note({6}, -1) is None
