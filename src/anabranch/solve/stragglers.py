"""Devices and links that take longer than predicted in comparison with the others.

If everything takes longer, the prediction is wrong. If one device takes longer and the others do
not, that device is slow: it is too hot, shares its processor, or is of another kind. So the time of
each is divided by its prediction, and the ratio is compared with the ratios of the others::

    device 0   computes 41 ms, predicted 40 ms     1.03
    device 1   computes 83 ms, predicted 41 ms     2.02      slow: 2.0 times as long as the others
    device 2   computes 43 ms, predicted 42 ms     1.02

A message counts if its receiver was already waiting when it was sent; it then took from the start
of the send to the end of the receive.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.solve.settings import SETTINGS
from anabranch.timeline import Span, Timeline

DEVICE_TIMES, LINK_TIMES = 1.4, 3.0
"""Factors over the others from which a device or a link is called slow. With lower ones a busy
machine alone would make processes slow."""

_Seconds = dict[tuple[int, ...], list[float]]
"""(device,), or both ends of a link -> its seconds, one per step or message."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device, or a link between two, that is slow.

    Attributes:
        devices: the device, or the two ends of the link.
        times: how many times as long it takes as the others, relative to predictions.
        seconds: seconds per step that it takes more than if it were like the others.
        is_alone: True for the only link, which is compared with its own prediction.
    """

    devices: tuple[int, ...]
    times: float
    seconds: float
    is_alone: bool = False

    def __str__(self) -> str:
        where = "-".join(map(str, self.devices))
        what = "device" if len(self.devices) == 1 else "link"
        than = "predicted" if self.is_alone else "the others, relative to predictions"
        times, more = f"{self.times:.1f} times as long as {than}", f"{self.seconds * 1e3:.3g} ms"
        return f"{what} {where} takes {times}: {more} more a step"


def stragglers(measured: Sequence[Timeline], predicted: Timeline) -> list[Straggler]:
    """Find slow devices and links, the worst first.

    Args:
        measured: steps of the same plan as ``predicted``; the median of several counts.
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
    """Return devices or links that take more than ``least`` times as long as others.

    Args:
        expected: predicted seconds in one step.
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
            continue  # a device alone cannot be told from a wrong prediction
        usual = max(statistics.median_low(others or [1.0]), float(is_link))
        if ratio > least * usual:
            more = (ratio - usual) * predicted_s[key] * len(expected[key])
            slow.append(Straggler(key, ratio / usual, more, is_alone=not others))
    return slow


def _ends(span: Span) -> tuple[int, int]:
    """Return the sender and receiver of a message."""
    peer = span.action.peer
    return (peer, span.device) if span.action.kind.is_receive else (span.device, peer)


def _message(span: Span) -> tuple[object, ...]:
    """Return the key of a message, the same at both ends."""
    action = span.action
    stages = (action.peer_stage, action.stage)
    ends = stages if action.kind.is_receive else stages[::-1]
    return (*_ends(span), *ends, action.start, action.stop)


def _awaited(timeline: Timeline) -> list[tuple[tuple[int, int], float]]:
    """Return (link, seconds) of the messages for which their receivers were waiting."""
    messages = [span for span in timeline.spans if not span.action.kind.is_compute]
    sent = {_message(span): span for span in messages if not span.action.kind.is_receive}
    awaited = []
    for span in messages:
        send = sent.get(_message(span)) if span.action.kind.is_receive else None
        if send is not None and span.start <= send.start:
            awaited.append((_ends(span), span.end - send.start))
    return awaited


def _transfers(timeline: Timeline) -> _Seconds:
    """Return the seconds of all messages of a predicted timeline, by link."""
    transfers: _Seconds = defaultdict(list)
    for span in timeline.spans:
        if span.action.kind.is_receive:
            transfers[_ends(span)].append(span.end - span.start)
    return transfers
