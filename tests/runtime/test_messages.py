"""What a message consists of, and how parts become a whole again."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.runtime.messages import Item, Layout, assemble, channels, gradient_ports
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.transport import Channel
from anabranch.schedule import SCHEDULES
from anabranch.schedule.asynchronous import round_robin
from anabranch.schedule.lower import lower
from anabranch.schedule.schedule import Kind
from tests.runtime.small import WIDTH, Built, built, plan
from tests.strategies import stage_graphs

FLOAT = torch.float32


def part(offset: int, rows: int) -> Item:
    return Item(0, None, torch.Size([rows, 2]), FLOAT, True, offset)


def test_parts_are_joined_by_offset() -> None:
    """Whatever order they arrive in."""
    parts = [(part(2, 1), torch.full((1, 2), 2.0)), (part(0, 2), torch.zeros(2, 2))]
    assert assemble(parts).tolist() == [[0, 0], [0, 0], [2, 2]]


def test_a_single_part_is_not_copied() -> None:
    tensor = torch.zeros(2, 2)
    assert assemble([(part(0, 2), tensor)]) is tensor


def test_gradients_of_a_value_without_samples_add_up() -> None:
    """Every slice of the consumer read the whole value."""
    item = Item(0, None, torch.Size([2]), FLOAT, False, 0)
    assert assemble([(item, torch.ones(2)), (item, torch.full((2,), 3.0))]).tolist() == [4, 4]


def layouts(model: Built, chosen: Plan) -> dict[int, tuple[Layout, list[str]]]:
    """Device -> its layout, and per message its text and the shapes that it carries."""
    graph = chosen.stage_graph
    parts = parts_of(model.captured, chosen, exact=False)
    schedule = lower(SCHEDULES[chosen.schedule]().order(graph), graph)
    result = {}
    for device, actions in schedule.actions.items():
        layout = Layout(model.captured.graph, parts, graph, device)
        result[device] = (
            layout,
            [
                f"{action} {[(list(i.shape), i.offset) for i in layout.items(action)]}"
                for action in actions
                if not action.kind.is_compute
            ],
        )
    return result


def test_a_producer_cuts_its_samples_for_two_replicas() -> None:
    """Stage 0 makes 4 samples at once, each replica of stage 1 takes 2: rows 0-1 and rows 2-3."""
    model = built("Chain")
    texts = layouts(model, plan(model, 2, batch_size=4, replicas=[1, 2]))[0][1]
    assert texts == [
        f"0SF0>1@1[0:2] [([2, {WIDTH}], 0)]",
        f"0SF0>1@2[2:4] [([2, {WIDTH}], 2)]",
        f"0RB0<1@1[0:2] [([2, {WIDTH}], 0)]",
        f"0RB0<1@2[2:4] [([2, {WIDTH}], 2)]",
    ]


def test_both_ends_of_a_message_see_the_same_tensors() -> None:
    """Shapes, types and tags, for values with and without samples, on unequal replicas."""
    model = built("Shared")
    chosen = plan(model, 3, batch_size=9, replicas=[2, 1, 2])
    graph = chosen.stage_graph
    parts = parts_of(model.captured, chosen, exact=False)
    schedule = lower(SCHEDULES["1f1b"]().order(graph), graph)
    ends: dict[tuple[object, ...], list[object]] = {}
    for device, actions in schedule.actions.items():
        layout = Layout(model.captured.graph, parts, graph, device)
        for action in actions:
            if action.kind.is_compute:
                continue
            sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            here, there = (action.stage, device), (action.peer_stage, action.peer)
            key = (*(here + there if sends else there + here), action.start, action.stop)
            seen = [(i.value, i.port, i.shape, i.dtype) for i in layout.items(action)]
            ends.setdefault(key, []).append((layout.tag(action), seen))
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in ends.values())


def test_a_value_without_samples_travels_once_per_slice() -> None:
    """The table is made on both replicas of stage 0; the consumer takes it with the first of its
    two messages.
    """
    model = built("Shared")
    chosen = plan(model, 2, batch_size=4, replicas=[2, 1])
    graph = chosen.stage_graph
    parts = parts_of(model.captured, chosen, exact=False)
    schedule = lower(SCHEDULES["1f1b"]().order(graph), graph)
    layout = Layout(model.captured.graph, parts, graph, 2)
    receives = [a for a in schedule.actions[2] if a.kind is Kind.RECEIVE_FORWARD]
    whole = [[i.value for i in layout.items(a) if not i.batched] for a in receives]
    assert len(receives) == 2
    assert whole[0]
    assert whole[1] == []


def test_only_uses_with_a_gradient_travel_back() -> None:
    """The mask of booleans does not."""
    model = built("Shared")
    program = parts_of(model.captured, plan(model, 3), exact=False).program(0, 4)
    types = {program.shapes[port.value][1] for port in program.outputs}
    back = {program.shapes[port.value][1] for port in gradient_ports(program.outputs)}
    assert types == {torch.bool, FLOAT}
    assert back == {FLOAT}


def test_the_part_of_a_tensor_is_a_view() -> None:
    whole: Tensor = torch.arange(8.0).view(4, 2)
    cut = part(1, 2).part(whole)
    assert cut.tolist() == [[2, 3], [4, 5]]
    assert cut.data_ptr() == whole[1].data_ptr()


def test_channels_are_those_of_the_lowered_schedule() -> None:
    """Whoever has to open connections beforehand opens those that messages use, and no others."""
    model = built("TwoBranch")
    chosen = plan(model, 3, replicas=[2, 1, 3], microbatch_size=[4, 8, 8])
    graph = chosen.stage_graph
    rank_of = graph.rank_of
    schedule = lower(SCHEDULES["1f1b"]().order(graph), graph)
    parts = parts_of(model.captured, chosen, exact=False)
    used = set()
    for device, actions in schedule.actions.items():
        layout = Layout(model.captured.graph, parts, graph, device)
        for action in actions:
            if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                used.add((rank_of[device], rank_of[action.peer], layout.tag(action)))
    assert set(channels(graph)) == used


@given(stage_graphs(max_replicas=4), st.integers(0, 60))
def test_every_message_has_its_channel(graph: StageGraph, turn: int) -> None:
    """What the stages of a mini-batch send to each other goes through channels that are known
    beforehand, and there are no others.
    """
    rounds = round_robin(graph)

    def used(turn: int) -> set[Channel]:
        """Channels of one mini-batch, between ranks of the whole plan."""
        one = rounds.for_turn(turn, 3)
        rank = [graph.rank_of[device] for device in one.devices]
        return {Channel(rank[c.sender], rank[c.receiver], c.tag) for c in channels(one)}

    assert used(turn) <= set(channels(rounds.graph))
    assert set().union(*(used(i) for i in range(12))) == set(channels(rounds.graph))
