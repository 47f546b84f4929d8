"""Messages of emulated stages against those of the real ones."""

import pytest

from anabranch.emulation.emulation import EmptyStages
from anabranch.plans.edges import message_edges
from anabranch.runtime.messages import Item, Layout
from anabranch.runtime.plan_parts import parts_of
from anabranch.schedule import SCHEDULES
from anabranch.schedule.lower import lower
from tests.runtime.small import built, plan


def sizes(items: tuple[Item, ...]) -> list[tuple[int, bool, int, bool]]:
    """What the receiver of a message needs to know of each tensor: value, direction, bytes."""
    return [(i.value, i.port is None, i.shape.numel() * i.dtype.itemsize, i.batched) for i in items]


@pytest.mark.parametrize("name", ["TwoBranch", "Chain", "Tied", "Shared"])
@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1, 3]])
def test_messages_are_as_large_as_the_models(name, replicas):
    """Every message of every device, gradients, booleans and values without samples included."""
    model = built(name)
    chosen = plan(model, 3, batch_size=9, replicas=replicas)
    graph, values = chosen.stage_graph, model.captured.graph
    parts, empty = parts_of(model.captured, chosen, exact=False), EmptyStages(values, graph)
    order = SCHEDULES["1f1b"]().order(graph)
    schedule = lower(order, graph, message_edges(graph, values))
    compared = 0
    for device, actions in schedule.actions.items():
        real = Layout(model.captured.graph, parts, graph, device)
        emulated = Layout(model.captured.graph, empty, graph, device)
        for action in actions:
            if not action.kind.is_compute:
                assert sizes(emulated.items(action)) == sizes(real.items(action)), str(action)
                assert emulated.tag(action) == real.tag(action)
                compared += 1
    assert compared
