"""Workers of all devices as threads of one process: the runtime without processes and sockets.

The threads share the model's parameters, so what they accumulate in ``.grad`` is already the sum
over replicas and over the stages of a tied parameter.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.plans.stages import split_evenly
from anabranch.runtime.reference import reference
from anabranch.schedule import SCHEDULES
from anabranch.schedule.schedule import Kind
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, on_devices, plan
from tests.runtime.threads import gradients, run, step, workers


@st.composite
def plans(draw: st.DrawFn, model: Built, stages: int = 4, samples: int = 13) -> Plan:
    """Numbers of stages and samples up to these, any of replicas, micro-batch sizes that differ
    from stage to stage.
    """
    count = draw(st.integers(1, stages))
    return plan(
        model,
        count,
        batch_size=draw(st.integers(1, samples)),
        microbatch_size=draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)),
        replicas=draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "1f1b-deep"])),
        recompute=draw(st.booleans()),
    )


def require_gradients(model: Built, chosen: Plan) -> None:
    """Loss and gradients are those of the batch in one process."""
    samples = chosen.stage_graph.batch_size
    leaves = batch(samples, seed=1, dtype=torch.float64)
    expected = reference(model.module, leaves, [(0, samples)])
    outcomes = run(model, chosen, leaves)
    assert sum(o.loss for o in outcomes) == pytest.approx(expected.loss, rel=1e-12)
    found = gradients(model)
    assert found.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["TwoBranch", "Shared"])
@settings(max_examples=6)
@given(data=st.data())
def test_any_plan_computes_the_gradient_of_the_batch(name: str, data: st.DataObject) -> None:
    """Unequal replicas and micro-batch sizes, short last micro-batches, empty slices: same loss,
    same gradient.
    """
    model = built(name, torch.float64)
    require_gradients(model, data.draw(plans(model)))


@pytest.mark.parametrize("name", ["TwoBranch", "Shared"])
@settings(max_examples=6)
@given(data=st.data())
def test_stages_on_one_device_hand_over_without_messages(name: str, data: st.DataObject) -> None:
    """Four stages on up to three devices, whole or in part the same ones, as their orders allow."""
    model = built(name, torch.float64)
    draw = data.draw
    devices = [tuple(draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]) for _ in range(4)]
    # Devices are numbered without gaps, as ranks are.
    used = {d: i for i, d in enumerate(sorted({d for each in devices for d in each}))}
    devices = [tuple(used[d] for d in each) for each in devices]
    chosen = plan(
        model,
        4,
        batch_size=draw(st.integers(1, 13)),
        microbatch_size=draw(st.lists(st.integers(1, 6), min_size=4, max_size=4)),
        replicas=[len(each) for each in devices],
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
    )
    require_gradients(model, on_devices(chosen, devices))


class Scores(nn.Module):
    """Scores without the dimensions of size one, that of one sample included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().squeeze()


class Compared(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right, self.scale = Scores(width), Scores(width), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        difference = self.left(x) - self.right(x)
        return self.scale(difference.reshape(len(x), -1, 1)).square().mean()


@pytest.mark.parametrize(("width", "sizes"), [(1, [1, 2, 4]), (3, [4, 2, 1])])
def test_one_sample_crosses_to_a_stage_of_several(width: int, sizes: list[int]) -> None:
    """Both ways, between devices and on one, where one sample has fewer dimensions than two."""
    leaves = {"x": torch.randn(4, 4)}
    module = Compared(width)
    captured = capture(module, leaves, granularity="operator")
    model = Built(captured, Workload(module, leaves))
    expected = reference(module, leaves, [(0, 4)])
    chosen = plan(model, 3, batch_size=4, microbatch_size=sizes)
    for devices in ([(0,), (1,), (2,)], [(0,), (0,), (0,)]):
        module.zero_grad()
        loss, found = step(model, on_devices(chosen, devices), leaves)
        assert loss == pytest.approx(expected.loss, rel=1e-6)
        torch.testing.assert_close(found, dict(expected.gradients))


def test_without_training_there_are_no_gradients() -> None:
    """Forwards only; the metrics come with the loss."""
    model = built("TwoBranch")
    leaves = batch(8)
    outcomes = run(model, plan(model, 3, batch_size=8), leaves, train=False)
    expected = reference(model.module, leaves, [(0, 4), (4, 8)])
    assert gradients(model) == {}
    assert sum(o.loss for o in outcomes) == expected.loss
    accuracy = sum(o.metrics.get("accuracy", 0.0) for o in outcomes)
    assert accuracy == expected.metrics["accuracy"]


def test_actions_on_an_empty_slice_fall_away() -> None:
    """One sample on two replicas: [0:0] and [0:1]. The first replica has nothing to do."""
    assert split_evenly(0, 1, 2) == [(0, 0), (0, 1)]
    model = built("Chain")
    made = workers(model, plan(model, 2, batch_size=1, replicas=[2, 1]), 1)
    assert [" ".join(map(str, worker.actions)) for worker in made] == [
        "",
        "0F0 0SF0>1@2[0:1] 0RB0<1@2[0:1] 0B0",
        "1RF0<0@1[0:1] 1F0 1B0 1SB0>0@1[0:1]",
    ]


def test_every_action_is_timed() -> None:
    """Ends do not come before starts, and the order is that of the schedule."""
    model = built("Chain")
    for outcome in run(model, plan(model, 2), batch(16)):
        times = [moment for _, pair in outcome.times for moment in pair]
        assert times == sorted(times)
        assert len(outcome.times) == 4 * 4


def test_an_edge_without_values_makes_its_stages_wait() -> None:
    """As in a sequential pipeline: the stages of another branch forward after those of the first,
    and go back before them.
    """
    model = built("TwoBranch")
    count = len(model.captured.graph)
    free = plan(model, count)
    edges = tuple(sorted({*free.stage_graph.edges, *pairwise(range(count))}))
    assert edges != free.stage_graph.edges
    chained = replace(free, stage_graph=replace(free.stage_graph, edges=edges))
    graph = SCHEDULES["1f1b"]().warm_up(chained.stage_graph)
    chained = replace(chained, stage_graph=graph)
    leaves = batch(16)
    outcomes = run(model, chained, leaves)
    found = {name: g.clone() for name, g in gradients(model).items()}
    ends: dict[tuple[int, Kind, int], tuple[float, float]] = {}
    for outcome in outcomes:
        for action, times in outcome.times:
            if action.kind.is_compute:
                ends[action.stage, action.kind, action.microbatch] = times
    for i in range(4):
        for x, y in edges:
            assert ends[x, Kind.FORWARD, i][1] <= ends[y, Kind.FORWARD, i][0]
            assert ends[y, Kind.BACKWARD, i][1] <= ends[x, Kind.BACKWARD, i][0]
    run(model, free, leaves)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient)
