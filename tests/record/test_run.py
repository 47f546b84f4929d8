"""The figures of a run, as a document."""

import sys
from dataclasses import replace

import pytest

from anabranch.record import Origin
from anabranch.timeline import Timeline
from tests.record.test_folder import PLAN, RUN, SPANS

UNRECORDED = replace(RUN, timelines=())


def test_the_first_step_does_not_count() -> None:
    """It sets things up: the median of 4 and 5 seconds, not of 9."""
    assert UNRECORDED.median_step_s == 4.5
    assert replace(UNRECORDED, step_s=(9.0,)).median_step_s == 9.0


def test_the_measured_step_is_the_one_that_the_timeline_shows() -> None:
    """Two clocks for one figure would contradict each other; without a flush it shows several."""
    timeline = Timeline(SPANS, (0,), "measured", 4.75, {})
    run = replace(RUN, timelines=(("measured", timeline),))
    assert run.median_step_s == run.figures()["step_s"] == 4.75
    assert replace(run, policy="stash").median_step_s == 4.5


def test_samples_per_second_are_those_of_the_period() -> None:
    """Four samples in two seconds; without a period, in the median step of 4.5 seconds."""
    assert replace(RUN, period_s=2.0).figures()["samples_per_s"] == 2.0
    assert RUN.figures()["samples_per_s"] == pytest.approx(4 / 4.5)


def test_the_last_loss_is_a_mean() -> None:
    """Of the last ten steps; of fewer, of those."""
    assert RUN.figures()["last_loss"] == pytest.approx(3.5 / 3)
    many = replace(RUN, losses=(100.0, *(float(i) for i in range(10))))
    assert many.figures()["last_loss"] == 4.5
    assert replace(RUN, losses=()).figures()["last_loss"] is None


def test_bubbles_and_compute_are_of_the_timelines() -> None:
    """Four of 4.5 seconds are compute; the prediction has half of it, and no bubble."""
    half = [replace(span, start=span.start / 2, end=span.end / 2) for span in SPANS]
    predicted = Timeline(tuple(half), (0,), "predicted", 2.0, {})
    run = replace(RUN, timelines=(("predicted", predicted), *RUN.timelines))
    figures = run.figures()
    assert (figures["bubble"], figures["predicted_bubble"]) == (pytest.approx(1 / 9), 0.0)
    assert figures["compute_ratio"] == pytest.approx(2.0)
    assert UNRECORDED.figures()["bubble"] is None
    assert replace(run, plan=replace(PLAN, predicted=None)).figures()["predicted_bubble"] is None


def test_a_run_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as one would type it again."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/anabranch", "train", "mmt", "-o", "a=b c"])
    here = Origin.here()
    assert here.command == "anabranch train mmt -o 'a=b c'"
    assert here.host
    assert {"python", "torch"} <= set(here.versions)
