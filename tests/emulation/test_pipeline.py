"""Emulated ranks: what happens in which order, and never faster than the devices could be."""

import time
from collections import defaultdict
from typing import NamedTuple

import pytest

from anabranch import launch
from anabranch.emulation import EmulatedPipeline, Emulation
from anabranch.errors import InvalidPlanError
from anabranch.plans.plan import Plan
from anabranch.profile.profile import Profile
from anabranch.schedule.schedule import Kind
from anabranch.simulator.run import step_seconds
from anabranch.timeline import Timeline
from tests.emulation.models import chain, job, machines

pytestmark = pytest.mark.dist

TOWERS = ((0, 2), (1, 2))


class Found(NamedTuple):
    """What a rank has of the last of its steps; ``wall_s`` is how long the call took."""

    timeline: Timeline
    seconds: float
    device_step_s: float
    late_s: float
    wall_s: float


def emulate(emulation: Emulation, steps: int = 1, **options: float) -> list[Found]:
    """Run steps on local ranks."""

    def rank() -> Found:
        pipe = EmulatedPipeline(emulation, **options)
        for _ in range(steps):
            begun = time.perf_counter()
            seconds = pipe.step(record=True)
            wall_s = time.perf_counter() - begun
        assert pipe.timeline is not None
        return Found(pipe.timeline, seconds, pipe.device_step_s, pipe.late_s, wall_s)

    return launch.run(rank, len(emulation.devices), timeout=120)


def ends(timeline: Timeline) -> dict[tuple[int, Kind, int, int], tuple[float, float]]:
    """Stage, kind, micro-batch, device -> start and end of a compute."""
    return {
        (s.action.stage, s.action.kind, s.action.microbatch, s.device): (s.start, s.end)
        for s in timeline.spans
        if s.action.kind.is_compute
    }


def test_every_rank_has_the_same_step() -> None:
    """Timeline and seconds, also in a second step on the same board."""
    on = machines(3)
    plan, profile = job(TOWERS, [(0,), (1,), (2,)], on)
    found = emulate(Emulation(plan, profile, on), steps=2)
    first = found[0]
    assert all(times[:4] == first[:4] for times in found)
    assert first.timeline.step_s == pytest.approx(first.seconds)
    assert first.seconds >= first.timeline.makespan_s - 1e-9


def test_computes_wait_for_what_they_need() -> None:
    """Forwards for those of both towers, backwards for that of the stage behind; on a device one
    after another, in the order of the schedule.
    """
    on = machines(2, 2)
    plan, profile = job(TOWERS, [(0,), (1,), (2, 3)], on)
    emulation = Emulation(plan, profile, on)
    timeline = emulate(emulation)[0].timeline
    times = ends(timeline)
    for microbatch in range(4):
        for x, y in TOWERS:
            for device in (2, 3):
                done = times[x, Kind.FORWARD, microbatch, x][1]
                assert done <= times[y, Kind.FORWARD, microbatch, device][0]
                done = times[y, Kind.BACKWARD, microbatch, device][1]
                assert done <= times[x, Kind.BACKWARD, microbatch, x][0]
    by_device = defaultdict(list)
    for span in timeline.spans:
        by_device[span.device].append(span)
    for device, spans in by_device.items():
        moments = [moment for span in spans for moment in (span.start, span.end)]
        assert moments == sorted(moments)
        assert tuple(span.action for span in spans) == emulation.schedule.actions[device]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-deep"])
def test_no_step_is_shorter_than_the_devices_could_do_it(schedule) -> None:
    """With a device's own links there is no order to get lucky with; overhead only adds."""
    on = machines(3, bandwidth=1e8)
    plan, profile = job(chain(3), [(0,), (1,), (2,)], on, schedule=schedule, value_bytes=100_000)
    emulation = Emulation(plan, profile, on)
    found = emulate(emulation)[0]
    predicted = step_seconds(plan.stage_graph, emulation.schedule, emulation.costs)
    assert found.device_step_s >= predicted * (1 - 1e-9)
    assert found.seconds >= found.device_step_s - 1e-9
    assert found.late_s >= 0


def test_an_all_reduce_follows_the_last_backward() -> None:
    """Half of 2 MB each way at 100 MB/s between two replicas: 20 ms after a backward, and nothing
    else.
    """
    on = machines(2, bandwidth=1e8, latency_s=0.0)
    plan, profile = job((), [(0, 1)], on, batch_size=4, parameter_bytes=2_000_000)
    device_step_s = emulate(Emulation(plan, profile, on))[0].device_step_s
    assert device_step_s >= 4 / 2 * 3e-3 + 0.02


def test_time_can_be_scaled() -> None:
    """Figures are the devices' all the same: the wall clock shows at least ten times as much, and
    a busy host only adds to that. On the second device two micro-batches take 12 ms; before them is
    a forward of 2 ms, after them a backward of 4.
    """
    on = machines(2)
    plan, profile = job(chain(2), [(0,), (1,)], on, batch_size=4)
    found = emulate(Emulation(plan, profile, on), time_scale=10.0)[0]
    assert found.device_step_s >= 18e-3
    assert found.timeline.step_s == pytest.approx(found.seconds)
    assert found.device_step_s - 1e-9 <= found.seconds <= found.wall_s / 10
    assert max(span.end for span in found.timeline.spans) <= found.wall_s / 10


def test_links_of_this_machine() -> None:
    """Messages and gradients really travel, and take the time they take."""
    on = machines(3, bandwidth=1.0)  # would take an hour, if it were modelled
    plan, profile = job(chain(2), [(0,), (1, 2)], on, parameter_bytes=60_000_000)
    found = emulate(Emulation(plan, profile, on, links="host"))[0]
    assert 8 * 3e-3 <= found.device_step_s <= found.seconds < 60


def test_one_device_needs_no_messages() -> None:
    """Nor other ranks."""
    on = machines(1)
    plan, profile = job((), [(0,)], on, batch_size=4)
    (found,) = emulate(Emulation(plan, profile, on))
    assert found.seconds >= found.device_step_s >= 4 * 3e-3


def test_many_more_ranks_than_cores() -> None:
    """A chain of 4 stages with 4 replicas each; messages are counted before anything runs."""
    on = machines(2, 8)
    devices = [tuple(range(4 * s, 4 * s + 4)) for s in range(4)]
    plan, profile = job(chain(4), devices, on, batch_size=32, microbatch_size=8)
    emulation = Emulation(plan, profile, on)
    assert emulation.num_messages == 2 * 3 * 4 * 4
    assert emulation.message_bytes == 2 * 3 * 32 * 1000
    timeline = emulate(emulation)[0].timeline
    assert len(timeline.devices) == 16
    assert len(timeline.spans) == 16 * 2 * 4 + 2 * emulation.num_messages


def refused(plan: Plan, profile: Profile, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        Emulation(plan, profile, machines(4))


def test_what_cannot_be_emulated_is_refused_before_a_rank_starts() -> None:
    """More devices than the cluster has, another model."""
    on = machines(8)
    refused(*job(chain(2), [(0,), (5,)], on), "uses device 5")
    plan, _ = job(chain(2), [(0,), (1,)], on)
    refused(plan, job(chain(3), [(0,), (1,), (2,)], on)[1], "each operator of the model")


def test_wrong_time_scales() -> None:
    """Links of this machine cannot be slowed."""
    on = machines(1)
    plan, profile = job((), [(0,)], on)
    with pytest.raises(ValueError, match="must be positive"):
        EmulatedPipeline(Emulation(plan, profile, on), time_scale=0.0)
    with pytest.raises(ValueError, match="cannot be slowed"):
        EmulatedPipeline(Emulation(plan, profile, on, links="host"), time_scale=2.0)


def test_as_many_ranks_as_devices() -> None:
    """Anything else is another plan."""
    on = machines(2)
    emulation = Emulation(*job(chain(2), [(0,), (1,)], on), on)
    with pytest.raises(InvalidPlanError, match="2 devices"):
        EmulatedPipeline(emulation)
