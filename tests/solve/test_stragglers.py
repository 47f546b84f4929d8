"""Devices and links are called slow in comparison with the others, never all of them."""

from dataclasses import replace

from anabranch.schedule.schedule import Action
from anabranch.solve.stragglers import stragglers
from anabranch.timeline import Span, Timeline


def timeline(*busy_s: float, source: str = "measured", late_s: float = 0.0) -> Timeline:
    """A forward on each device, one after the other, 1 ms for each message; that from device 1 to
    device 2 takes longer.
    """
    spans, now = [], 0.0
    for device, seconds in enumerate(busy_s):
        if device:
            arrival = now + 0.001 + (late_s if device == 2 else 0.0)
            begun = now if source == "predicted" else 0.0
            receive = Action.parse(f"{device}RF0<{device - 1}@{device - 1}[0:4]")
            send = Action.parse(f"{device - 1}SF0>{device}@{device}[0:4]")
            spans += [Span(device, begun, arrival, receive), Span(device - 1, now, now, send)]
            now = arrival
        spans.append(Span(device, now, now + seconds, Action.parse(f"{device}F0")))
        now += seconds
    return Timeline(tuple(spans), tuple(range(len(busy_s))), source, now, {})


EXPECTED = timeline(0.040, 0.041, 0.042, source="predicted")
LATE = timeline(0.040, 0.041, 0.042, late_s=0.02)


def test_a_device_that_takes_longer_than_the_others_is_named() -> None:
    """Twice as long as was predicted, where the others take as long; in the median of three."""
    slow, once = timeline(0.040, 0.082, 0.042), timeline(0.400, 0.041, 0.042)
    (found,) = stragglers([slow, once, slow], EXPECTED)
    assert found.devices == (1,)
    assert str(found) == (
        "device 1 takes 2.0 times as long as the others, relative to predictions: 41 ms more a step"
    )


def test_if_all_take_longer_nobody_is_slow() -> None:
    """Then the prediction was wrong, which is said elsewhere."""
    assert stragglers([timeline(0.120, 0.123, 0.126)], EXPECTED) == []
    assert stragglers([], EXPECTED) == []


def test_of_two_devices_the_slower_one_is_named() -> None:
    expected = timeline(0.04, 0.04, source="predicted")
    (found,) = stragglers([timeline(0.04, 0.08)], expected)
    assert found.devices == (1,)


def test_a_device_without_others_is_not_called_slow() -> None:
    """It has none to be compared with: three times as long as predicted is a wrong prediction."""
    alone = timeline(0.04, source="predicted")
    assert stragglers([timeline(0.12)], alone) == []


def test_the_only_link_is_compared_with_its_prediction() -> None:
    """From device 1 to device 2, as device 0 does nothing; the text names no others."""
    expected, late = (replace(t, spans=t.spans[3:]) for t in (EXPECTED, LATE))
    (found,) = stragglers([late], expected)
    assert str(found) == "link 1-2 takes 21.0 times as long as predicted: 20 ms more a step"


def test_a_link_that_takes_longer_than_the_others_is_named() -> None:
    """By messages whose receivers were waiting: 21 ms in place of 1 ms."""
    (found,) = stragglers([LATE], EXPECTED)
    assert found.devices == (1, 2)
    assert str(found).startswith("link 1-2 takes 21.0 times as long as the others, relative")


def test_messages_that_nobody_waited_for_say_nothing() -> None:
    """The receiver came later; how long the message took is not known."""
    spans = tuple(
        replace(span, start=span.end - 1e-6) if span.action.kind.is_receive else span
        for span in LATE.spans
    )
    assert stragglers([replace(LATE, spans=spans)], EXPECTED) == []
