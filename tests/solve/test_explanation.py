"""Explanations as they are printed."""

from anabranch.solve import explain
from anabranch.solve.explanation import shorten
from tests.simulator.helpers import chain, cluster, cost_model, stage_graph
from tests.solve.helpers import a_plan


def summary(cost, graph) -> list[str]:
    """Lines of the explanation of a plan."""
    return explain(a_plan(graph), cost.profile, cost.cluster).summary().splitlines()


def test_a_pipeline_of_two_stages():
    """Every part has its line; the edge that holds up most has the names of its operators."""
    cost = cost_model(chain(2), [1, 2], [1, 2], cluster(2, bandwidth=1.0), value_bytes=1)
    lines = summary(cost, stage_graph(chain(2), [(0,), (1,)], 1))
    assert lines == [
        "why this plan: no step can be shorter than",
        "  work                          3000.00 ms  over 2 devices",
        "  largest operator              4000.00 ms  op1, over 1",
        "  longest path, there and back  6000.00 ms  of 1 sample",
        "  this plan, by busiest link    1000.00 ms  out of device 0",
        "the step of device 1 (stage 1), which computes most, is",
        "  work                          3000.00 ms  37.5%  evenly, in its best slices",
        "  imbalance                     1000.00 ms  12.5%  above the mean device",
        "  warm-up                       1000.00 ms  12.5%  until its first backward",
        "  drain                         1000.00 ms  12.5%  after its last forward",
        "  edge 0 -> 1, 0% queued        1000.00 ms  12.5%  op0 -> op1",
        "  edge 1 -> 0, 0% queued        1000.00 ms  12.5%  op1 -> op0",
        "  together                      8000.00 ms 100.0%",
        "what would help most: links infinitely fast would save 25.0%",
    ]


def test_a_plan_that_waits_for_no_machine():
    """One device alone: no link, no balance, no memory would change its step."""
    lines = summary(cost_model((), [1], [2], cluster(1)), stage_graph((), [(0,)], 2))
    assert lines[-2:] == [
        "  together                      6000.00 ms 100.0%",
        "no single change of links, updates, memory or balance would save 0.1% of it",
    ]


def test_data_parallelism_that_cannot_be_faster():
    """100 bytes of weights at 1 byte/s take longer over both devices than the whole step."""
    cost = cost_model(chain(2), [1, 1], [1, 1], cluster(2, bandwidth=1.0), parameter_bytes=100)
    lines = summary(cost, stage_graph(chain(2), [(0,), (1,)], 2))
    assert lines[-1] == "data parallelism cannot be faster: its all-reduce alone takes longer"


def test_an_operator_keeps_both_ends_of_its_name():
    """The first part says where it is, the last what it is."""
    assert shorten("encoder.0.layers.1.attention", 20) == "encoder.0..attention"
    assert shorten("attention", 20) == "attention"
