"""Asynchronous pipelines on local ranks: plans for the models here, and many runs in one launch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch import launch
from anabranch.errors import AnabranchError, NonFiniteError
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import asynchronous_stages
from anabranch.runtime.plan_parts import prepare
from anabranch.workload import Batch
from tests.runtime.asynchronous.models import Cut, batches

LIMIT_S = 60.0


def plan_of(
    model: Cut,
    batch_size: int = 4,
    *,
    microbatches: int = 1,
    replicas: Sequence[int] | None = None,
    recompute: bool = False,
    schedule: str = "1f1b",
) -> Plan:
    """The model's stages, each on devices of its own, in flight as without a flush. Their programs
    are made here, once for all ranks.
    """
    counts = replicas or [1] * len(model.operators)
    firsts = [sum(counts[:s]) for s in range(len(counts))]
    stages = tuple(
        Stage(
            tuple(names),
            tuple(range(first, first + count)),
            batch_size // microbatches,
            recompute=recompute,
        )
        for names, first, count in zip(model.operators, firsts, counts, strict=True)
    )
    of = {name: s for s, stage in enumerate(stages) for name in stage.operators}
    graph = model.captured.graph
    pairs = {(of[graph.ops[a].name], of[graph.ops[b].name]) for a, b in graph.edges}
    edges = tuple(sorted((x, y) for x, y in pairs if x != y))
    nothing = Prediction(1.0, 1.0, 0.0, (0,) * sum(counts))
    stage_graph = StageGraph(stages, edges, batch_size)
    prepare(model.captured, stage_graph)
    plan = Plan(stage_graph, schedule, "by hand", "", "", "", 0.0, 0.0, nothing)
    return replace(plan, stage_graph=asynchronous_stages(plan), mode="async", policy="stash")


def on_ranks(chosen: Plan, work: Callable[[], Any]) -> list[Any]:
    """Call something on every rank of a plan."""
    return launch.run(work, len(chosen.stage_graph.devices), timeout=LIMIT_S)


def fresh(model: Cut, start: dict[str, Tensor]) -> None:
    """Give a rank the whole model again, of which an earlier pipeline has kept one stage."""
    for name, parameter in model.workload.module.named_parameters():
        parameter.data, parameter.grad = start[name].clone(), None


def start_of(model: Cut) -> dict[str, Tensor]:
    """The model's weights."""
    return {n: p.detach().clone() for n, p in model.workload.module.named_parameters()}


def pipeline(model: Cut, chosen: Plan, policy: Any = "stash", **options: Any) -> AsyncPipeline:
    """On a rank."""
    options = {
        "workload": model.workload,
        "captured": model.captured,
        "check_gradients": False,
        "timeout": 20.0,
    } | options
    return AsyncPipeline(plan=chosen, policy=policy, **options)


def held(pipe: AsyncPipeline) -> dict[str, Tensor]:
    """A rank's parameters."""
    return {n: p.detach().clone() for n, p in pipe._state.parameters.items()}


def whole(results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All parameters, from what ranks hold; copies are equal."""
    found: dict[str, Tensor] = {}
    for mine in results:
        for name, tensor in mine.items():
            assert torch.equal(found.setdefault(name, tensor), tensor)
    return found


def by_hand(model: Cut) -> dict[str, Tensor]:
    """Parameters of the reference, by the names of the model."""
    mine = dict(model.workload.module.named_parameters())
    theirs = {id(p): p for stage in model.by_hand for p in stage.module.parameters()}
    assert len(mine) == len(theirs)
    return {n: t.detach() for n, t in zip(mine, theirs.values(), strict=True)}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: object = "") -> None:
    """The same tensors bit for bit."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), (name, what)


Trained = tuple[list[float], dict[str, Tensor]]


def trained(
    model: Cut, chosen: Plan, data: Sequence[Batch], policy: Any = "stash", **options: Any
) -> list[Trained]:
    """Losses and parameters of every rank after some mini-batches."""

    def work() -> Trained:
        pipe = pipeline(model, chosen, policy, **options)
        return list(pipe.steps(data)), held(pipe)

    return on_ranks(chosen, work)


def assert_trained(results: Sequence[Trained], losses: Sequence[float], twin: Cut) -> None:
    """Every rank has these losses, and all have the reference's parameters, bit for bit."""
    assert all(rank[0] == losses for rank in results)
    assert_same(whole([rank[1] for rank in results]), by_hand(twin))


def assert_near(results: Sequence[Trained], losses: Sequence[float], twin: Cut) -> None:
    """Likewise, where sums are made in another order."""
    assert all(rank[0] == pytest.approx(losses, rel=1e-9) for rank in results)
    theirs = by_hand(twin)
    for name, tensor in whole([rank[1] for rank in results]).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-10)


def until_not_finite(
    pipe: AsyncPipeline, data: Sequence[Batch], held_out: Sequence[Batch]
) -> tuple[list[float], str]:
    """Train, and evaluate after the second loss, until a number is not finite: losses and error."""
    losses: list[float] = []

    def loop() -> None:
        for loss in pipe.steps(data):
            losses.append(loss)
            if len(losses) == 2:
                pipe.evaluate(held_out)

    with pytest.raises(NonFiniteError) as caught:
        loop()
    return losses, str(caught.value)


def in_turn(model: Cut, chosen: Plan, policy: Any = "stash", **options: Any) -> AsyncPipeline:
    return pipeline(model, chosen, policy, round_robin=True, **options)


def refusals(model: Cut, *cases: tuple[Plan, Any, dict[str, Any]]) -> list[str]:
    """Class and text of the error of each pipeline, by plan, policy and options: the class is the
    same on all ranks, of which all plans have as many.
    """

    def work() -> list[str]:
        texts = []
        for chosen, policy, options in cases:
            with pytest.raises((AnabranchError, ValueError)) as caught:
                pipeline(model, chosen, policy, **options).step(batches(1, 8)[0])
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        return texts

    first, *others = on_ranks(cases[0][0], work)
    kinds = [text.split(":")[0] for text in first]
    assert all([text.split(":")[0] for text in texts] == kinds for texts in others)
    return first
