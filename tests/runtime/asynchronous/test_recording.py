"""A timeline of some mini-batches, recorded while the pipeline is full."""

from itertools import pairwise

import pytest

from anabranch.schedule.schedule import Kind
from anabranch.timeline import Timeline
from tests.runtime.asynchronous.models import batches, cut
from tests.runtime.asynchronous.running import on_ranks, pipeline, plan_of

pytestmark = pytest.mark.dist


def filmed(name: str, count: int, wanted: int, microbatches: int = 1) -> list[Timeline | None]:
    """What every rank has of a run of so many mini-batches, of which the first three are past."""
    model = cut(name)
    policy = "2bw" if microbatches > 1 else "stash"
    chosen = plan_of(model, microbatches=microbatches)

    def work() -> Timeline | None:
        pipe = pipeline(model, chosen, policy)
        for i, _ in enumerate(pipe.steps(batches(count))):
            if i == 2:
                pipe.record(wanted)
        return pipe.timeline

    return on_ranks(chosen, work)


def test_all_devices_are_shown_for_the_same_time() -> None:
    """Every device alternates one backward and one forward without a gap in the numbers. No message
    arrives before it was sent: clocks of ranks agree, and a message is known by its samples on both
    ends.
    """
    first, *others = filmed("two branches", 20, 6, 4)
    assert first is not None
    assert all(other == first for other in others)
    for device in first.devices:
        spans = [s for s in first.spans if s.device == device and s.action.kind.is_compute]
        assert all(0 <= s.start <= s.end <= first.step_s for s in spans)
        assert all(a.end <= b.start for a, b in pairwise(spans))
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            numbers = [s.action.microbatch for s in spans if s.action.kind is kind]
            assert len(numbers) >= 4
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        kinds = [s.action.kind for s in spans]
        assert all(a is not b for a, b in pairwise(kinds))
    sent, arrived = {}, {}
    for span in first.spans:
        a = span.action
        if a.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            way = a.kind is Kind.SEND_FORWARD
            sent[way, a.stage, a.peer_stage, a.start, a.stop] = span.start
        elif not a.kind.is_compute:
            way = a.kind is Kind.RECEIVE_FORWARD
            arrived[way, a.peer_stage, a.stage, a.start, a.stop] = span.end
    both = sent.keys() & arrived.keys()
    assert len(both) >= 8
    assert all(sent[key] <= arrived[key] for key in both)


def test_a_run_that_ends_within_the_window_has_no_timeline() -> None:
    """Rather than one with holes."""
    assert filmed("chain 2", 8, 6) == [None, None]
