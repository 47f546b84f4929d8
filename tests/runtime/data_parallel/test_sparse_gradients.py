"""Rows of embedding tables exchanged between their holders, against one process with the same
sparse gradients.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import launch
from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.data_parallel.sparse_gradients import SparseBucket
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.state.optimizer_facts import require_recipe_updates
from anabranch.workload import NamedParameters, Workload
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.small import Batch, Built, load_compiler, num_ranks, plan, train_alone
from tests.runtime.training import Way, run_each

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # Adagrad makes such tensors
]

ROWS, WIDTH, BAG = 400, 4, 3
LIMIT_S = 60.0


class Bags(nn.Module):
    """Two tables, one read twice, whose gradients are sparse, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, word: Tensor, more: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.words(word).sum(1) + self.bags(more)))
        return F.mse_loss(h + F.embedding(more, self.words.weight, sparse=True).mean(1), x)


class Tables(nn.Module):
    """A table alone in the first stage, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, word: Tensor, more: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(self.words(word).sum(1)), x)


def batch(samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "word": torch.randint(0, ROWS // 40, (samples, BAG), generator=generator),
        "more": torch.randint(0, ROWS, (samples, BAG), generator=generator),
        "x": torch.randn(samples, WIDTH, generator=generator),
    }


BATCHES = [batch(n, seed) for seed, n in enumerate((16, 10, 1, 16))]


def sgd(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adagrad(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


WHOLE = partial(torch.optim.SGD, lr=0.5, momentum=1e-30)
"""As ``sgd``, but it gets whole gradients."""


class Two(torch.optim.Optimizer):
    """SparseAdam for tables, Adam for the rest, as users of sparse gradients have it."""

    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__([p for _, p in parameters], {})
        tables = [p for name, p in parameters if "layer" not in name]
        others = [p for name, p in parameters if "layer" in name]
        self.parts = [torch.optim.SparseAdam(tables)] if tables else []
        self.parts += [torch.optim.Adam(others)] if others else []  # type: ignore[list-item]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def made(kind: type[nn.Module]) -> Built:
    torch.manual_seed(0)
    module = kind()
    return Built(capture(module, batch(4)), Workload(module, batch(4)))


@pytest.mark.filterwarnings("ignore:Two is not of torch.optim")
def test_compiled_stages_sum_whole_gradients_and_give_rows_to_who_takes_these_alone() -> None:
    """SparseAdam refuses others. Batches of one size are compiled once."""
    load_compiler()
    model, batches = made(Tables), BATCHES[::3]
    two = replace(model.workload, optimizer=Two)
    options = {"compute": ComputeOptions(compile="aot_eager")}
    work = partial(trained, batches=batches)
    found = on_ranks(model, plan(model, 1, replicas=[2]), two, work, **options)
    assert [tables for _, _, tables in found] == [[], []]
    assert_as_alone(model, two, found, batches)


def test_without_a_flush_an_optimizer_of_rows_gets_them_from_replicas() -> None:
    """They sum whole gradients, of which it gets the rows that were looked up: as on one rank."""
    model = made(Tables)
    model = replace(model, workload=replace(model.workload, optimizer=Two))
    data = [batch(8, seed) for seed in range(3)]
    losses = []
    for replicas in (1, 2):
        chosen = async_plan(model, 1, replicas=[replicas])
        losses.append(
            launch.run(
                lambda chosen=chosen: [*built_pipeline(model, chosen).steps(data)],
                num_ranks(chosen),
                timeout=LIMIT_S,
            )[0]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.fixture(scope="module")
def bags() -> Built:
    return made(Bags)


def on_ranks(
    model: Built, chosen: Plan, workload: Workload, work: Callable[[Pipeline], Any], **options: Any
) -> list[Any]:
    return on_ranks_each(model, chosen, (work, {"workload": workload} | options))[0]


def on_ranks_each(model: Built, chosen: Plan, *ways: Way) -> list[list[Any]]:
    """Results by function and rank; gradients are compared with one process first."""
    return run_each(model, chosen, *((work, {"check_gradients": True} | o) for work, o in ways))


def row_tables(pipeline: Pipeline) -> list[str]:
    """The tables whose rows are exchanged."""
    buckets = [b for queue in pipeline._updates.reducer._queues for b in queue.buckets]
    tables = [b for b in buckets if isinstance(b, SparseBucket)]
    return sorted(name for b in tables for name, _ in b.named)


def trained(
    pipeline: Pipeline, batches: Sequence[Batch] = BATCHES
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    losses = [pipeline.step(each) for each in batches]
    pipeline.update()
    parameters = {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}
    return losses, parameters, row_tables(pipeline)


def assert_as_alone(
    model: Built, workload: Workload, found: list[Any], batches: Sequence[Batch] = BATCHES
) -> None:
    """Within float32's rounding: rows are added up in another order. Copies are equal bitwise."""
    module = made(type(model.module)).module
    if workload.clip_norm is not None:  # torch clips no sparse gradients; here they are the same
        for part in module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False
    alone = replace(workload, module=module)
    losses, parameters = train_alone(alone, batches)
    for rank, (mine, tensors, _) in enumerate(found):
        assert mine == pytest.approx(losses, rel=1e-5), rank
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, parameters[name], rtol=1e-5, atol=1e-6)
            for _, others, _ in found:
                if name in others:
                    assert torch.equal(tensor, others[name])


@pytest.mark.filterwarnings("ignore:Two is not of torch.optim")
def test_training_is_that_of_one_process(bags: Built) -> None:
    """By optimizers, without and with shared state. Batches of 10 and 1 samples leave some ranks
    without a row.
    """
    cases: list[tuple[Any, bool]] = [(sgd, False), (sgd, True), (adagrad, True), (Two, False)]
    workloads = [
        replace(bags.workload, optimizer=optimizer, clip_norm=None if optimizer is Two else 0.5)
        for optimizer, _ in cases
    ]
    ways: list[Way] = [
        (trained, {"workload": workload, "shard_optimizer": shard})
        for workload, (_, shard) in zip(workloads, cases, strict=True)
    ]
    results = on_ranks_each(bags, plan(bags, 1, replicas=[3]), *ways)
    for workload, found in zip(workloads, results, strict=True):
        assert all(tables == ["bags.weight", "words.weight"] for _, _, tables in found)
        assert_as_alone(bags, workload, found)


def test_a_table_that_two_stages_read(bags: Built) -> None:
    """Its rows come from all replicas of both, of which one has three times as many samples."""
    workload = replace(bags.workload, optimizer=sgd)
    chosen = plan(bags, 2, replicas=[1, 2], microbatch_size=[2, 4])
    found = on_ranks(bags, chosen, workload, trained)
    assert "words.weight" in found[0][2]
    assert_as_alone(bags, workload, found)


def test_a_stage_of_tables_alone_takes_sparse_adam() -> None:
    """Which refuses whole gradients, so rows are exchanged though they are more than the table."""
    model = made(Tables)

    def recipe(parameters: NamedParameters) -> torch.optim.Optimizer:
        tables = [p for name, p in parameters if name.startswith("words")]
        return torch.optim.SparseAdam(tables) if tables else torch.optim.Adam(parameters)

    two = replace(model.workload, optimizer=Two)
    chosen = plan(model, 2, replicas=[2, 1], batch_size=400)
    found = on_ranks(model, chosen, replace(two, optimizer=recipe), trained)
    assert [tables for _, _, tables in found] == [["words.weight"], ["words.weight"], []]
    assert_as_alone(model, two, found)


def test_several_batches_make_an_update(bags: Built) -> None:
    """Rows of all of them are exchanged once: as with whole gradients, which momentum asks for."""

    def work(pipeline: Pipeline) -> tuple[list[str], dict[str, Tensor]]:
        for each in BATCHES[:3]:
            pipeline.step(each)
        pipeline.update()
        parameters = {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}
        return row_tables(pipeline), parameters

    workloads = [replace(bags.workload, optimizer=optimizer) for optimizer in (sgd, WHOLE)]
    ways = [(work, {"workload": workload, "accumulate": 2}) for workload in workloads]
    rows, whole = on_ranks_each(bags, plan(bags, 1, replicas=[2]), *ways)
    assert rows[0][0]
    assert not whole[0][0]
    for name, tensor in rows[0][1].items():
        torch.testing.assert_close(tensor, whole[0][1][name], rtol=1e-5, atol=1e-6)


def test_half_precision_and_steps_without_a_barrier(bags: Built) -> None:
    """Rows are unscaled like whole gradients, and looked at for what is not finite."""

    def work(pipeline: Pipeline) -> list[float]:
        return list(pipeline.steps(BATCHES))

    workloads = [replace(bags.workload, optimizer=optimizer) for optimizer in (sgd, WHOLE)]
    half = ComputeOptions(precision="fp16")
    ways = [(work, {"workload": workload, "compute": half}) for workload in workloads]
    rows, whole = on_ranks_each(bags, plan(bags, 1, replicas=[2]), *ways)
    assert rows[0] == pytest.approx(whole[0], rel=1e-2)


def test_more_rows_than_the_table_has_go_whole(bags: Built) -> None:
    """Two holders with 6 * 100 lookups each against a table of 400 rows."""
    workload = replace(bags.workload, optimizer=sgd)
    chosen = plan(bags, 1, replicas=[2], batch_size=200)
    assert on_ranks(bags, chosen, workload, row_tables) == [[], []]


class Whole(nn.Module):
    """A table with whole gradients, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, word: Tensor, more: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(self.words(word)), x)


SPARSE = ComputeOptions(sparse_embeddings=True)


def test_an_option_makes_gradients_of_tables_sparse() -> None:
    """With what the model learns without it; the model's own program stays as it is."""
    model = made(Whole)
    workload = replace(model.workload, optimizer=adagrad)
    ways: list[Way] = [
        (trained, {"workload": workload, "compute": SPARSE}),
        (row_tables, {"workload": workload}),
    ]
    found, tables = on_ranks_each(model, plan(model, 1, replicas=[2]), *ways)
    assert found[0][2] == ["words.weight"]
    assert_as_alone(model, workload, found)
    assert tables == [[], []]


def test_a_plan_makes_gradients_of_tables_sparse() -> None:
    """As the option does, which decides where it is given."""
    model = made(Whole)
    workload = replace(model.workload, optimizer=adagrad)
    chosen = replace(plan(model, 1, replicas=[2]), sparse_embeddings=True)
    dense = ComputeOptions(sparse_embeddings=False)
    ways = [(row_tables, {"workload": workload} | o) for o in ({}, {"compute": dense})]
    assert on_ranks_each(model, chosen, *ways) == [[["words.weight"]] * 2, [[], []]]


def test_the_option_asks_for_an_optimizer_that_takes_it() -> None:
    """On a rank with tables; the plan says before that the optimizer by default takes none."""
    model = made(Whole)
    chosen = plan(model, 1, replicas=[2])
    with pytest.raises(TrainingError, match=r"AdamW, .* cannot .* --no-sparse-embeddings"):
        on_ranks(model, chosen, model.workload, row_tables, compute=SPARSE)
    said = "SparseAdam, or SGD or Adagrad without momentum.* AdamW, the default, does not"
    assert re.search(said, replace(chosen, sparse_embeddings=True).summary())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SparseAdam])
def test_an_optimizer_that_takes_other_gradients_is_refused_before_it_trains(
    optimizer: Any,
) -> None:
    """AdamW takes no sparse ones, SparseAdam no others; SGD takes both, and optimizers that are not
    PyTorch's are not tried.
    """
    model = made(Tables)
    workload = replace(
        model.workload, optimizer=lambda named: optimizer([p for _, p in named], lr=0.1)
    )
    with pytest.raises(TrainingError, match=r"of words.weight and .* leave sparse=True out"):
        on_ranks(model, plan(model, 1), workload, row_tables)
    for other in (sgd, Two):
        require_recipe_updates(replace(workload, optimizer=other), model.captured.graph)
