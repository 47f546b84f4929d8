"""Passes by number, scheduled in a list."""

import sys
from dataclasses import replace
from importlib import import_module

import pytest

from anabranch.schedule.list_passes import ListPasses, lengths_of
from anabranch.schedule.zero_bubble import ZeroBubble
from tests.simulator.helpers import chain, stage_graph

ROW = stage_graph(chain(3), [(i,) for i in range(3)], 6)
DIAMOND = stage_graph(((0, 1), (0, 2), (1, 3), (2, 3)), [(0, 1), (2,), (3,), (0, 1)], 9, [2] * 4)


def uneven(graph):
    """Stages of unequal lengths, with messages."""
    loads = (1.0, 0.7, 0.4, 0.9)
    stages = zip(graph.stages, loads, strict=False)
    own = tuple(replace(s, load=load, weight_share=0.4, message=0.1) for s, load in stages)
    return replace(graph, stages=own)


@pytest.mark.parametrize("graph", [ROW, uneven(ROW), uneven(DIAMOND)])
def test_machine_code_makes_the_same_list_as_plain_python(graph, monkeypatch):
    """To the last bit: ranks run in plain Python what a search has planned with machine code."""
    graph = ZeroBubble().warm_up(graph)
    lengths, lists = lengths_of(graph.stages), []
    import_module("numba")
    for is_loaded in (True, False):
        if not is_loaded:
            monkeypatch.delitem(sys.modules, "numba")
        passes = ListPasses(graph)
        improved = passes.improved(passes.scheduled(lengths), lengths)
        lists.append((improved.order.tolist(), improved.ends.tolist()))
    assert lists[0] == lists[1]


def test_what_a_stage_holds_at_most():
    """Under H1 as many micro-batches as the first stage of 1F1B, if there are so many."""
    graph = ZeroBubble().warm_up(ROW)
    passes = ListPasses(graph)
    assert passes.most_in_flight(passes.scheduled(lengths_of(graph.stages))) == [3, 3, 3]
