"""The devices' time, whatever the host does."""

import time

from anabranch.emulation.clock import DeviceClock


def started(ago: float = 0.0, scale: float = 1.0) -> DeviceClock:
    """A clock whose step began so long ago, by the wall."""
    clock = DeviceClock()
    clock.start(time.perf_counter() - ago, scale)
    return clock


def test_compute_takes_its_time_from_when_the_device_was_free():
    """Ends are sums of lengths to the last bit; late wake-ups are no part of them."""
    clock = started()
    for _ in range(10):
        clock.pass_by(0.001)
        assert clock.wall >= clock.now
    assert clock.now == sum([0.001] * 10)


def test_a_message_that_has_arrived_is_not_waited_for():
    """Time does not go back."""
    clock = started()
    clock.pass_by(0.002)
    clock.meet(0.001)
    assert clock.now == 0.002
    clock.meet(0.003)
    assert clock.now == 0.003


def test_a_host_that_is_late_does_not_make_the_device_late():
    """The wait is skipped, and that it was late is noted, in the device's time."""
    clock = started(ago=1.0, scale=4.0)
    clock.pass_by(0.05)
    assert clock.now == 0.05
    assert clock.late_s >= 0.2


def test_work_of_the_runtime_counts_as_cpu_time():
    """Sleeping does not, nor what lies between ``charge`` and ``resume``."""
    clock = started()
    time.sleep(0.02)
    clock.charge()
    slept = clock.now
    assert slept < 0.02
    sum(range(300_000))
    clock.resume()
    clock.charge()
    between = clock.now - slept
    sum(range(300_000))
    clock.charge()
    assert clock.now - slept > 2 * between


def test_the_wall_clock_is_read_in_the_devices_time():
    """With links of this machine the devices' time is the wall's."""
    clock = started(ago=2.0, scale=2.0)
    before = clock.wall
    clock.catch_up()
    assert 1.0 <= before <= clock.now <= clock.wall
