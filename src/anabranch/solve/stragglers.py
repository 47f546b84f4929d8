"""Devices and links that take longer than was predicted, beside the others.

That everything takes longer is a matter of the prediction. One device that does while others do not
is slow itself: it is too hot, shares its processor, or is of another kind. So each is compared with
what was predicted for it, and the ratio with that of the others::

    device 0   computes 41 ms, predicted 40 ms     1.03
    device 1   computes 83 ms, predicted 41 ms     2.02      slow: 2.0 times as long as the others
    device 2   computes 43 ms, predicted 42 ms     1.02

A message counts where its receiver was waiting when it was sent: then it took from the one moment
to the other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.schedule.schedule import Action
from anabranch.solve.settings import SETTINGS
from anabranch.timeline import Span, Timeline

DEVICE_TIMES, LINK_TIMES = 1.4, 3.0
"""Factors over the others from which a device, or a link, is called slow. Lower ones would name
whatever a busy machine does to one of its processes."""

_Seconds = dict[tuple[int, ...], list[float]]
"""Device, or both ends of a link -> its times."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device, or a link between two, that is slow.

    Attributes:
        devices: one, or the two ends of a link.
        times: how many times as long it takes as others would.
        seconds: in a step, more than if it were as the others are.
        is_alone: the only link, which has just its own prediction to be compared with.
    """

    devices: tuple[int, ...]
    times: float
    seconds: float
    is_alone: bool = False

    def __str__(self) -> str:
        where = "-".join(map(str, self.devices))
        what = "device" if len(self.devices) == 1 else "link"
        how = f"{self.times:.1f} times as long as predicted"
        how += "" if self.is_alone else " beside the others"
        return f"{what} {where} takes {how}, {self.seconds * 1e3:.3g} ms a step"


def stragglers(measured: Sequence[Timeline], predicted: Timeline) -> list[Straggler]:
    """Find slow devices and links, the worst first.

    Args:
        measured: of the same plan as ``predicted``; of several steps the median counts.
    """
    if not measured:
        return []
    step_s = statistics.median(timeline.step_s for timeline in measured)
    busy: _Seconds = {(d,): [t.busy_s[d] for t in measured] for d in predicted.devices}
    expected: _Seconds = {(device,): [seconds] for device, seconds in predicted.busy_s.items()}
    slow = _slow(busy, expected, DEVICE_TIMES)
    links: _Seconds = defaultdict(list)
    for timeline in measured:
        for link, seconds in _awaited(timeline):
            links[link].append(seconds)
    slow += _slow(links, _transfers(predicted), LINK_TIMES)
    least_s = SETTINGS.straggler_share * step_s
    worst = (straggler for straggler in slow if straggler.seconds > least_s)
    return sorted(worst, key=lambda straggler: -straggler.seconds)


def _slow(measured: _Seconds, expected: _Seconds, least: float) -> list[Straggler]:
    """Return stages or devices that take more than ``least`` times as long as others.

    Args:
        expected: seconds of one step.
    """
    predicted_s = {key: statistics.median(seconds) for key, seconds in expected.items()}
    ratios = {
        key: statistics.median(seconds) / predicted_s[key]
        for key, seconds in measured.items()
        if predicted_s.get(key)
    }
    slow = []
    for key, ratio in ratios.items():
        others, is_link = [other for peer, other in ratios.items() if peer != key], len(key) > 1
        if not (others or is_link):
            continue  # of a device alone that is a matter of the prediction
        usual = max(statistics.median_low(others or [1.0]), float(is_link))
        if ratio > least * usual:
            more = (ratio - usual) * predicted_s[key] * len(expected[key])
            slow.append(Straggler(key, ratio / usual, more, is_alone=not others))
    return slow


def _ends(span: Span) -> tuple[int, int]:
    """Sender and receiver of a message."""
    peer = span.action.peer
    return (peer, span.device) if span.action.kind.is_receive else (span.device, peer)


def _message(span: Span) -> tuple[object, ...]:
    """Key of a message, the same at both ends."""
    action: Action = span.action
    stages = (action.peer_stage, action.stage)
    ends = stages if action.kind.is_receive else stages[::-1]
    return (*_ends(span), *ends, action.start, action.stop)


def _awaited(timeline: Timeline) -> list[tuple[tuple[int, int], float]]:
    """Seconds of the messages that their receivers were waiting for."""
    messages = [span for span in timeline.spans if not span.action.kind.is_compute]
    sent = {_message(span): span for span in messages if not span.action.kind.is_receive}
    awaited = []
    for span in messages:
        send = sent.get(_message(span)) if span.action.kind.is_receive else None
        if send is not None and span.start <= send.start:
            awaited.append((_ends(span), span.end - send.start))
    return awaited


def _transfers(timeline: Timeline) -> _Seconds:
    """Seconds of all messages of a predicted timeline, by link."""
    transfers: _Seconds = defaultdict(list)
    for span in timeline.spans:
        if span.action.kind.is_receive:
            transfers[_ends(span)].append(span.end - span.start)
    return transfers
