"""Real ranks, drawn plans: any stages, replicas, micro-batch sizes and schedules end without a hang
and with the gradient of the batch.

Ranks are forked once per number of ranks and go through many plans. ``ANABRANCH_RUNS`` sets how
many there are for each number of ranks: hundreds where the runtime has changed.
"""

import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anabranch.launch import run
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.schedule import SCHEDULES
from tests.runtime.small import Built, batch, built, plan_of

RUNS = int(os.environ.get("ANABRANCH_RUNS", "12"))
AT_ONCE = 12
"""Plans of one launch."""

MODELS = ("TwoBranch", "Chain", "Tied", "Shared", "Unused", "Detached")


def linear_extension(draw: st.DrawFn, model: Built) -> list[int]:
    """Operators in a drawn topological order, so that its runs are stages of every shape."""
    graph = model.captured.graph
    waiting = {i: {a for a, b in graph.edges if b == i} for i in range(len(graph))}
    order: list[int] = []
    while waiting:
        ready = sorted(i for i, needs in waiting.items() if not needs - set(order))
        order.append(draw(st.sampled_from(ready)))
        del waiting[order[-1]]
    return order


@st.composite
def plans(draw: st.DrawFn, model: Built, num_ranks: int) -> Plan:
    """Stages from a drawn order cut at drawn places, on all of so many devices; some hold several
    stages, others are replicas.
    """
    graph = model.captured.graph
    order = linear_extension(draw, model)
    count = draw(st.integers(1, min(num_ranks + 1, len(order))))
    cuts = sorted(draw(st.permutations(range(1, len(order))))[: count - 1])
    bounds = [0, *cuts, len(order)]
    holders: list[list[int]] = [[] for _ in range(count)]
    for device in draw(st.permutations(range(num_ranks))):
        empty = [s for s in range(count) if not holders[s]]
        holders[empty[0] if empty else draw(st.integers(0, count - 1))].append(device)
    for held in holders:
        if not held:  # more stages than devices: one of them has two
            held.append(draw(st.integers(0, num_ranks - 1)))
    batch_size = draw(st.integers(1, 13))
    stages = tuple(
        Stage(
            tuple(graph.ops[i].name for i in sorted(order[bounds[s] : bounds[s + 1]])),
            tuple(holders[s]),
            draw(st.integers(1, 6)),
            recompute=draw(st.booleans()),
        )
        for s in range(count)
    )
    return plan_of(model, stages, batch_size, draw(st.sampled_from(sorted(SCHEDULES))))


Case = tuple[str, Plan, dict[str, Tensor], float, dict[str, Tensor]]


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> Case:
    """A model, a plan, a batch of any size, and what one process makes of it."""
    name = draw(st.sampled_from(MODELS))
    model = built(name, torch.float64)
    plan = draw(plans(model, num_ranks))
    samples = draw(st.sampled_from([plan.stage_graph.batch_size, draw(st.integers(1, 20))]))
    leaves = batch(samples, seed=samples, dtype=torch.float64)
    expected = reference(model.module, leaves, [(0, samples)])
    return name, plan, leaves, expected.loss, dict(expected.gradients)


def differences(cases: Sequence[Case]) -> list[str]:
    """On every rank: what is wrong, in words; nothing where all is right."""
    wrong = []
    for i, (name, plan, leaves, loss, gradients) in enumerate(cases):
        model = built(name, torch.float64)
        kept = [(p, p.data) for p in model.module.parameters()]
        pipe = Pipeline(model.workload, plan, captured=model.captured, check_gradients=False)
        found_loss, found = pipe.gradients(leaves)
        if abs(found_loss - loss) > 1e-9 * abs(loss):
            wrong.append(f"case {i}: loss {found_loss} instead of {loss} under {plan.stage_graph}")
        for key, gradient in found.items():
            if not torch.allclose(gradient, gradients[key], rtol=1e-9, atol=1e-12):
                wrong.append(f"case {i}: gradient of {key} under {plan.stage_graph}")
        pipe.close()
        for parameter, data in kept:
            parameter.data, parameter.grad = data, None
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@settings(
    max_examples=max(RUNS // AT_ONCE, 1),
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(data=st.data())
def test_drawn_plans_on_real_ranks(num_ranks: int, data: st.DataObject) -> None:
    """No hang (each launch has a limit), and loss and gradients of one process."""
    drawn = [data.draw(cases(num_ranks)) for _ in range(AT_ONCE)]
    for wrong in run(differences, num_ranks, drawn, timeout=120):
        assert not wrong, wrong[0]
