"""GPipe's order and counts."""

from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.gpipe import GPipe


def test_all_forwards_then_all_backwards():
    """On every stage, and every micro-batch is held; k has no say."""
    graph = StageGraph((Stage(("a",), (0,), 2, k=2), Stage(("b",), (1,), 3)), ((0, 1),), 6)
    warm = GPipe().warm_up(graph)
    assert [stage.in_flight for stage in warm.stages] == [3, 2]
    assert str(GPipe().order(warm)) == "0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1F1 1B0 1B1"
