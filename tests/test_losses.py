"""Losses of every kind: loss, metrics and gradients are those of the whole batch in one process,
however the batch is sliced.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import launch, solve
from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.errors import CaptureError, InvalidPlanError, TrainingError
from anabranch.graph.capture import capture
from anabranch.graph.loss_kinds import loss_notes
from anabranch.plans.check import stage_bytes
from anabranch.plans.plan import Plan
from anabranch.plans.whole_batch import whole_batch_stages
from anabranch.profile.estimate import estimate
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import Reference, call, reference
from anabranch.schedule import rule_named
from anabranch.verification import even_plan, verify
from anabranch.workload import Workload
from tests.losses import MODELS, WIDTH, Contrastive, Tokens, batch
from tests.runtime.small import Built, num_ranks, on_devices, plan, with_programs
from tests.runtime.training import LIMIT_S, on_one_device

COUPLED = [name for name, (_, kind) in MODELS.items() if kind == "coupled"]

OF_EVERY_KIND = (
    "mean",
    "sum",
    "penalised sum",
    "masked",
    "fraction",
    "contrastive",
    "normed together",
    "captioned",
)
"""Of every kind some, to be cut and added up over replicas, and to be evaluated, by the same
coefficients; that a model can be sliced at all, and where its coefficients come from, is what the
tests in one process ask of each of them.
"""


@cache
def built(name: str) -> Built:
    torch.manual_seed(0)
    module = MODELS[name][0]().train()
    return Built(capture(module, batch(4)), Workload(module, batch(4)))


def distance(ours: dict[str, Tensor], theirs: Reference) -> float:
    """The largest difference relative to the largest gradient."""
    largest = max(float(g.abs().max()) for g in theirs.gradients.values())
    assert ours.keys() == theirs.gradients.keys()
    return max(float((ours[n] - g).abs().max()) for n, g in theirs.gradients.items()) / largest


@pytest.mark.parametrize("name", MODELS)
def test_every_micro_batch_size_has_the_gradients_of_the_whole_batch(name: str) -> None:
    """Nine samples, also with a short micro-batch at the end and with micro-batches without one
    label; the loss is that of the whole batch as well. The kind is found in the graph:
    coupled losses name the operators that need the whole batch, others need none.
    """
    model, given = built(name), batch(9, 3)
    graph = model.captured.graph
    assert graph.loss_kind == MODELS[name][1]
    assert bool(graph.whole_batch) == (graph.loss_kind == "coupled")
    expected = reference(model.module, given, [(0, 9)])
    for size in (4, 1):
        cut = plan(model, 2, batch_size=9, microbatch_size=size)
        alone = on_devices(cut, [(0,), (0,)])
        pipeline = Pipeline(model.workload, alone, captured=model.captured, check_gradients=False)
        loss, gradients = pipeline.gradients(given)
        assert loss == pytest.approx(expected.loss, rel=1e-6)
        assert distance(gradients, expected) < 1e-6


class Product(nn.Module):
    """A loss that is a product of scores ``[n, WIDTH]`` and something else."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.product = nn.Linear(WIDTH, WIDTH), product

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.product(self.head(y)).sum()


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        (lambda h: (mean := h.mean(0)) * mean, "coupled"),
        (lambda h: (total := h.sum(0)) * total, "coupled"),
        (lambda h: (total := h.sum(0)) + total, "sum"),
        (lambda h: h.T @ h, "sum"),
        (lambda h: torch.addmm(torch.eye(WIDTH), h.T, h), "coupled"),
        (lambda h: torch.einsum("ni,nj->ij", h, h), "sum"),
        (lambda h: torch.einsum("n...,n...->...", h, h.exp()), "sum"),
        (lambda h: torch.einsum("ni,mi->i", h, h.exp()), "coupled"),
        (lambda h: h.reshape(-1, 2) * h[:, :2].repeat(3, 1), "coupled"),
        (lambda h: F.mse_loss(h.reshape(-1, 2), h[:, :2].repeat(3, 1)), "coupled"),
        (lambda h: F.cross_entropy(h.view(-1, 2), h[:, 0].long().abs().repeat(3)), "coupled"),
        (lambda h: torch.cat([h.view(-1, 2), h[:, :2].repeat(3, 1)], 1).exp(), "coupled"),
        (lambda h: h.repeat_interleave(2) * h.repeat(1, 2).flatten(), "sum"),
        (lambda h: h.T.repeat_interleave(2) * h.repeat(1, 2).flatten(), "coupled"),
        (lambda h: h.reshape(-1, 2) * h[:, :2].repeat_interleave(3, 0), "sum"),
        (lambda h: h.view(-1, 3, 2).transpose(0, 1).flatten(0, 1) * h[:, :2].repeat(3, 1), "sum"),
    ],
)
def test_a_product_of_two_sums_over_samples_is_not_a_sum(
    product: Callable[[Tensor], Tensor], kind: str
) -> None:
    """A mean times itself is read twice by one call; a sum of products over samples is a sum, if
    these are of one sample each.
    """
    assert capture(Product(product), batch(4)).graph.loss_kind == kind


@pytest.mark.parametrize(
    "name", [*(name for name in OF_EVERY_KIND if name != "contrastive"), "experts"]
)
def test_evaluation_is_that_of_the_whole_batch(name: str) -> None:
    """Loss and metrics, by micro-batches of one sample; ``captioned`` has a contrastive loss."""
    model, given = built(name), batch(9, 3)
    expected = reference(model.module, given, [(0, 9)])
    alone = on_devices(plan(model, 2, batch_size=9, microbatch_size=1), [(0,), (0,)])
    pipeline = Pipeline(model.workload, alone, captured=model.captured, check_gradients=False)
    found = pipeline.evaluate([given])
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
    for metric, value in expected.metrics.items():
        assert found[metric] == pytest.approx(value, rel=1e-6)


def test_running_means_are_those_of_the_whole_batch() -> None:
    """One step moves them once, as one call of the module does."""
    torch.manual_seed(0)
    module = MODELS["normed together"][0]().train()
    module.norm = nn.SyncBatchNorm(WIDTH)
    alone = copy.deepcopy(module)
    model = Built(capture(module, batch(4)), Workload(module, batch(4)))
    cut = on_devices(plan(model, 2, batch_size=8, microbatch_size=2), [(0,), (0,)])
    Pipeline(model.workload, cut, captured=model.captured).step(batch(8))
    call(alone, batch(8))
    for name, buffer in alone.named_buffers():
        assert torch.allclose(module.get_buffer(name), buffer, rtol=1e-6), name


@pytest.mark.dist
@pytest.mark.parametrize("stages", [1, 3])
def test_replicas_have_the_gradients_of_the_whole_batch(stages: int) -> None:
    """Two or four ranks, where the first stage has two replicas of unequal slices, and batches of
    other sizes than planned follow.
    """
    names = [name for name in OF_EVERY_KIND if stages > 1 or name not in COUPLED]
    models = {name: with_programs(built(name), 1, 2, 3, 5, 9) for name in names}
    replicas = [2, 1, 1][:stages]
    plans = {
        name: plan(m, stages, batch_size=9, microbatch_size=3, replicas=replicas)
        for name, m in models.items()
        if len(m.captured.graph) >= stages
    }
    sizes = (9, 5)

    def work() -> dict[tuple[str, int], tuple[float, dict[str, Tensor]]]:
        found = {}
        for name, chosen in plans.items():
            pipeline = Pipeline(
                models[name].workload, chosen, captured=models[name].captured, timeout=20.0
            )
            for size in sizes:
                loss, gradients = pipeline.gradients(batch(size, size))
                found[name, size] = loss, {n: g.clone() for n, g in gradients.items()}
            pipeline.close()
        return found

    ranks = launch.run(work, num_ranks(next(iter(plans.values()))), timeout=LIMIT_S)
    for name in plans:
        for size in sizes:
            expected = reference(models[name].module, batch(size, size), [(0, size)])
            gradients = {n: g for rank in ranks for n, g in rank[name, size][1].items()}
            assert ranks[0][name, size][0] == pytest.approx(expected.loss, rel=1e-6)
            assert distance(gradients, expected) < 1e-6


@pytest.mark.parametrize("name", COUPLED)
def test_a_plan_that_slices_a_coupled_operator_is_refused(name: str) -> None:
    """With what to change, before anything is trained."""
    model = built(name)
    graph = even_plan(model.captured.graph, 2, 8)
    stages = tuple(replace(s, microbatch_size=2) for s in graph.stage_graph.stages)
    wrong = replace(graph, stage_graph=replace(graph.stage_graph, stages=stages))
    with pytest.raises(InvalidPlanError, match=r"computes across samples.*a micro-batch of 8"):
        Pipeline(model.workload, on_devices(wrong, [(0,), (0,)]), captured=model.captured)


@pytest.mark.dist
def test_verify_tells_the_kind_and_compares_the_whole_batch() -> None:
    """A contrastive loss against the module on the whole batch; a masked mean likewise, because
    its micro-batches have other counts; a sum also against its micro-batches, bit for bit.
    """
    found = {
        name: verify(
            built(name).workload, 2, batch=batch(8), captured=built(name).captured, timeout=LIMIT_S
        )
        for name in ("contrastive", "masked", "sum")
    }
    assert all(result.is_good for result in found.values())
    assert found["sum"].bitwise
    assert found["sum"].whole_batch_error is not None
    assert found["sum"].whole_batch_error < 1e-6
    assert "the module on the whole batch" in found["contrastive"].summary()
    assert "coupled, as a contrastive loss is" in found["contrastive"].summary()
    assert "such as labels that are not ignored" in found["masked"].summary()


class Silent(Tokens):
    """A hinge that is satisfied: no loss, no gradient."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return (self.scores(x).square().sum(-1) * 0 - 1).relu().mean()


class Swapped(Tokens):
    """Compares each sample with one that its scores name, by an index along the samples."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores = self.scores(x)
        other = scores[scores[:, 0].argmax(-1).clamp(max=1)]
        return (scores - other).square().mean()


class BoundedAfterUse(Tokens):
    """Bounds a weight that it has read: the next micro-batch would read it otherwise."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        loss = self.scores(x).square().mean()
        self.head.weight.data.clamp_(-0.1, 0.1)
        return loss


def test_a_weight_that_is_bounded_after_it_was_read_is_refused() -> None:
    """The first micro-batch would have the loss of other weights than those after it."""
    with pytest.raises(CaptureError, match=r"changes head.weight, .* in place .*clamp_"):
        capture(BoundedAfterUse(), batch(4))


def test_zero_against_zero_is_no_proof() -> None:
    """A loss of 0 without a gradient is equal in any pipeline."""
    with pytest.raises(TrainingError, match="nothing can be verified: the loss of this batch is 0"):
        verify(Workload(Silent(), batch(4)), 1, batch=batch(4), timeout=LIMIT_S)


def test_a_coupling_that_the_graph_does_not_show_is_found_by_numbers() -> None:
    """In training before the first step, and by verify, each with what to do."""
    workload, pipeline = on_one_device(Swapped(), batch)
    with pytest.raises(TrainingError, match="micro-batches change what Swapped is trained on"):
        pipeline.step(batch(8))
    result = verify(workload, 1, batch=batch(8), timeout=LIMIT_S)
    assert not result.is_good
    assert "micro-batches change what is trained" in result.why()


class Normed(Contrastive):
    """Batch normalisation in a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


def test_batch_normalisation_in_a_tower_stays_per_micro_batch() -> None:
    """It does not make the tower coupled, and verify says so; the bias before it, whose gradient
    is zero but for rounding, is no difference.
    """
    captured = capture(Normed(), batch(4))
    assert captured.graph.normalised == ("right.1",)
    assert [op.name for op in captured.graph.ops if op.whole_batch] == ["matmul"]
    result = verify(
        Workload(captured.module, batch(4)), 1, batch=batch(8), captured=captured, timeout=LIMIT_S
    )
    assert result.is_good
    assert "batch normalisation in right.1: its statistics are those of a micro" in result.summary()
    graph = estimate(captured, "v100", (2, 4)).graph
    assert loss_notes(graph.loss_kind, graph.normalised)[1] in result.summary()


@pytest.mark.parametrize("planner", ["auto", "graphpipe", "data-parallel", "even", "dapple"])
def test_a_contrastive_model_is_planned_with_its_whole_batch(planner: str) -> None:
    """By every planner, without and with replicas; the plan says so, and passes the check."""
    profile = estimate(built("contrastive").captured, "v100", (1, 2, 4, 8, 16))
    found = solve.plan(profile, Cluster.preset("local:4"), 16, planner=planner, improve=False)
    whole = whole_batch_stages(found.stage_graph, profile.graph)
    assert [found.stage_graph.stages[s].microbatch_size for s in whole] == [16]
    assert solve.check_plan(found, profile, Cluster.preset("local:4")) == []


class WideTowers(nn.Module):
    """Two towers whose layers take most of the time, and CLIP's loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
        self.left, self.right = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = 10 * a @ b.T
        own = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def test_memory_and_step_of_a_coupled_loss_are_planned() -> None:
    """Towers in micro-batches of 8 of 64 samples, and a loss of all of them: the step is at most
    2 % longer than with a loss of 8 samples, which is another loss; memory is within a tenth.
    """
    torch.manual_seed(0)
    module, given = WideTowers(), {"x": torch.randn(64, 256), "y": torch.randn(64, 256)}
    captured = capture(module, {name: leaf[:4] for name, leaf in given.items()})
    profile, cluster = estimate(captured, "v100", (1, 8, 64)), Cluster.preset("summit:1x2")
    options = {"planner": "even", "max_replicas": 1, "microbatch_size": 8, "improve": False}
    found = solve.plan(profile, cluster, 64, **options)
    towers, loss = found.stage_graph.stages
    assert (towers.microbatch_size, loss.microbatch_size) == (8, 64)

    def variation(**changes: Any) -> Plan:
        stages = tuple(replace(stage, **changes) for stage in (towers, loss))
        graph = rule_named("1f1b").warm_up(replace(found.stage_graph, stages=stages))
        return replace(found, stage_graph=graph, schedule="1f1b")

    ops = tuple(replace(op, whole_batch=False) for op in profile.graph.ops)
    free = replace(profile, graph=replace(profile.graph, ops=ops))
    whole_s = solve.simulate(found, profile, cluster).step_s
    sliced_s = solve.simulate(variation(microbatch_size=8), free, cluster).step_s
    assert sliced_s < whole_s < 1.02 * sliced_s

    alone = variation(devices=(0,))
    cost = CostModel(profile, cluster)
    said = sum(
        stage_bytes(alone.stage_graph, cost, s, in_flight=stage.in_flight)
        for s, stage in enumerate(alone.stage_graph.stages)
    )
    recipe = partial(torch.optim.AdamW, fused=True)
    pipeline = Pipeline(
        Workload(module, given, optimizer=recipe), alone, captured=captured, check_gradients=False
    )
    pipeline.step(given)
    pipeline.step(given, weigh=True)
    assert pipeline.peak_bytes is not None
    assert 0.9 * said < pipeline.peak_bytes[0] <= said
