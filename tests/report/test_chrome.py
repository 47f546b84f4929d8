"""The trace for chrome://tracing and Perfetto."""

import json
from collections import defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.chrome import trace
from anabranch.timeline import OverheadSpan, SumSpan
from tests.report.examples import STEP, TWO_TOWERS, timeline
from tests.strategies import stage_graphs, timelines

TRACE = trace(timeline(STEP), TWO_TOWERS)
EVENTS = TRACE["traceEvents"]


def of_phase(phase):
    return [event for event in EVENTS if event["ph"] == phase]


def test_an_action_is_a_complete_event_in_microseconds():
    """0B0 on device 0 from 4 to 5 ms."""
    (event,) = [e for e in of_phase("X") if e["args"]["action"] == "0B0"]
    assert (event["pid"], event["ts"], event["dur"]) == (0, 4000, 1000)
    assert event["name"] == "backward 0"
    assert event["args"]["samples"] == [0, 2]
    assert event["args"]["operators"] == "text.0, text.1"


def test_every_span_is_an_event():
    """Compute and messages."""
    assert len(of_phase("X")) == len(timeline(STEP).spans)


def test_devices_are_processes_with_named_threads():
    """In the order of the pictures."""
    named = {e["pid"]: e["args"]["name"] for e in of_phase("M") if e["name"] == "process_name"}
    assert named[2] == "device 2 \u00b7 stage 2"
    threads = {(e["pid"], e["args"]["name"]) for e in of_phase("M") if e["name"] == "thread_name"}
    assert {(0, "compute"), (0, "messages"), (1, "compute")} <= threads


def test_a_message_is_an_arrow_from_send_to_receive():
    """The activations of micro-batch 0 leave device 0 after 1 ms; the arrow ends at device 2."""
    start, end = (next(e for e in of_phase(p) if e["name"] == "activations") for p in "sf")
    assert start["id"] == end["id"]
    assert (start["pid"], start["ts"]) == (0, 1000)
    assert (end["pid"], end["bp"]) == (2, "e")


def test_arrows_begin_and_end_inside_their_slices():
    """Viewers bind an arrow to the slice around its time; it never runs backwards."""
    slices = defaultdict(list)
    for e in of_phase("X"):
        slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for e in [*of_phase("s"), *of_phase("f")]:
        assert any(a <= e["ts"] <= b for a, b in slices[e["pid"], e["tid"]])
    starts = {e["id"]: e["ts"] for e in of_phase("s")}
    assert all(starts[e["id"]] <= e["ts"] for e in of_phase("f"))


def test_memory_is_a_counter():
    """1 MiB, then 3, then 1 again on every device."""
    found = [(e["ts"], e["args"]["bytes"]) for e in of_phase("C") if e["pid"] == 0]
    assert found == [(0, 2**20), (1000, 3 * 2**20), (6000, 2**20)]


def test_messages_at_the_same_time_get_threads_of_their_own():
    """Slices of one thread must nest; two sends that overlap by half would not."""
    text = "0: 0SF0>1@1[0:2] 1-3 | 0SF1>1@1[2:4] 2-4 | 0SF2>1@1[4:6] 3-5"
    events = trace(timeline(text), TWO_TOWERS)["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [3, 4, 3]


def test_all_reduces_have_a_thread_of_their_own():
    """Beside the compute that they overlap; both devices of the ring have it."""
    sums = tuple(SumSpan(d, 7.5e-3, 8.5e-3, (0,), 400) for d in (0, 1))
    events = trace(replace(timeline(STEP), sums=sums), TWO_TOWERS)["traceEvents"]
    found = [e for e in events if e["ph"] == "X" and e["name"] == "all-reduce"]
    assert [(e["pid"], e["tid"], e["ts"], round(e["dur"])) for e in found] == [
        (0, 2, 7500, 1000),
        (1, 2, 7500, 1000),
    ]
    assert found[0]["args"] == {"stages": [0], "bytes": 400}
    threads = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert {e["pid"] for e in threads if e["args"]["name"] == "all-reduce"} == {0, 1}


def test_updates_are_on_the_thread_of_compute():
    """They take the device's own time."""
    overheads = (OverheadSpan(1, 7.5e-3, 8.5e-3, "update"),)
    events = trace(replace(timeline(STEP), overheads=overheads), TWO_TOWERS)["traceEvents"]
    (found,) = (e for e in events if e["name"] == "update")
    assert (found["pid"], found["tid"], found["ts"], round(found["dur"])) == (1, 1, 7500, 1000)


def test_equal_actions_are_all_there():
    """Two messages of one kind may take no time and begin together."""
    text = "0: 0SF0>1@1[0:2] 1-1 | 0SF0>1@1[0:2] 1-1"
    events = trace(timeline(text), TWO_TOWERS)["traceEvents"]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [1000, 1000]


@given(st.data(), stage_graphs())
def test_any_step_gives_a_trace(data, graph):
    """Plain JSON without NaN; every event has the fields that its phase needs."""
    step = data.draw(timelines(graph))
    events = json.loads(json.dumps(trace(step, graph), allow_nan=False))["traceEvents"]
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "tid", "args"},
        "C": {"name", "pid", "ts", "args"},
    }
    for event in events:
        assert needed[event["ph"]] <= event.keys()
    assert sum(event["ph"] == "X" for event in events) == len(step.spans) + len(step.sums)
