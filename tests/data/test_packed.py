"""Batches of which some tensors have other things than samples in dimension 0."""

import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import anabranch
from anabranch.data.columns import Columns
from anabranch.data.packed import PackedBatch, RowPacking
from anabranch.errors import DataError
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule import rule_named
from anabranch.verification import even_plan
from anabranch.workload import Workload, to_meta

ROWS, TOKENS = 5, 7
SAID: dict[str, Any] = {"rows": {"patches": ROWS}, "samples_in": {"positions": 1}}


class Model(nn.Module):
    """Patches of all samples one after the other, and positions in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.words = nn.Linear(6, 8), nn.Embedding(10, 8)
        self.places, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(
        self,
        ids: torch.Tensor,
        patches: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        """Return a cross-entropy."""
        image = self.encoder(patches).view(len(ids), -1, 8).mean(1)
        x = self.words(ids) + image[:, None] + self.places(positions).sum(0)
        return F.cross_entropy(self.head(self.body(x).relu()).flatten(0, 1), labels.flatten())


def batch(samples: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """One as the module takes it."""
    generator = torch.Generator().manual_seed(samples)
    return {
        "ids": torch.randint(10, (samples, TOKENS), generator=generator),
        "patches": torch.randn(samples * rows, 6, generator=generator),
        "positions": torch.randint(9, (3, samples, TOKENS), generator=generator),
        "labels": torch.randint(10, (samples, TOKENS), generator=generator),
    }


def test_samples_are_in_front_and_come_back_for_the_module() -> None:
    """Nested, moved and pickled as a dict is."""
    own = batch(4)
    packed = RowPacking((("patches", ROWS, ""),), (("positions", 1),)).packed(own)
    assert packed.tensors["patches"].shape == (4, ROWS, 6)
    assert packed.tensors["positions"].shape == (4, 3, TOKENS)
    torch.manual_seed(0)
    module = Model()
    assert torch.equal(packed.packing.call(module, packed.tensors, traced=False), module(**own))
    again = pickle.loads(pickle.dumps(pytree.tree_map(lambda tensor: tensor + 0, packed)))
    assert all(torch.equal(again.tensors[name], packed.tensors[name]) for name in own)
    assert to_meta(packed).tensors["patches"].device.type == "meta"


def test_what_is_plain_to_see_in_an_example_is_told() -> None:
    """By the labels; what is said by the user is not told again."""
    with pytest.warns(UserWarning, match="4 samples, patches has 5 rows per sample, positions has"):
        workload = Workload(Model(), batch(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = Workload(Model(), batch(4), **SAID)
        plain = Workload(Model(), {"x": torch.zeros(4, 2), "labels": torch.zeros(4)})
    assert repr(workload.example) == repr(said.example)
    assert isinstance(plain.example, dict)


def test_gradients_are_those_of_one_process() -> None:
    """Micro-batches of one and of two samples, of a batch that is shorter than the plan's, too."""
    torch.manual_seed(0)
    workload = Workload(Model(), batch(4), **SAID)
    captured = anabranch.capture(workload.module, workload.example)
    plan = even_plan(captured.graph, 2, 4)
    stages = tuple(replace(s, devices=(0,)) for s in plan.stage_graph.stages)
    graph = rule_named("1f1b").warm_up(replace(plan.stage_graph, stages=stages))
    pipeline = Pipeline(workload, replace(plan, stage_graph=graph), captured=captured)
    for samples in (4, 3):
        loss, gradients = pipeline.gradients(batch(samples))
        workload.module.zero_grad()
        expected = workload.module(**batch(samples))
        wanted = torch.autograd.grad(expected, list(workload.module.parameters()))
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for (name, _), gradient in zip(workload.module.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)


def test_rows_of_one_sample_never_move_into_the_next() -> None:
    """A wrong total is refused, and wrong counts whose total is right."""
    rows = RowPacking((("patches", ROWS, ""),), (("positions", 1),))
    own = batch(4)
    with pytest.raises(DataError, match=r"4 samples have 19 rows of patches; .* each has 5"):
        rows.packed({**own, "patches": own["patches"][:19]})
    with pytest.raises(DataError, match="has no patches, positions, of which the Workload says"):
        rows.packed({"ids": own["ids"]})
    counted = {**own, "counts": torch.tensor([5, 5, 4, 6])}
    workload = Workload(
        Model(),
        {**own, "counts": torch.tensor([5] * 4)},
        rows={"patches": "counts"},
        samples_in={"positions": 1},
    )
    says = "sample 2 has 4 rows of patches, sample 0 5; .* move into the next"
    with pytest.raises(DataError, match=says):
        workload.example.packing.packed(counted)


def test_every_kind_of_data_gives_the_same_batches() -> None:
    """A function, batches, and single samples, which are put in front when they are stacked."""
    own = batch(4)
    stacked = RowPacking((("patches", ROWS, ""),), (("positions", 1),)).packed(own).tensors
    samples = [{name: tensor[i] for name, tensor in stacked.items()} for i in range(4)]

    def function(size: int, epoch: int) -> Iterator[Any]:
        yield own

    loader = torch.utils.data.DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    for data in (function, loader, iter([own]), Columns(stacked)):
        workload = Workload(Model(), own, data=data, **SAID)
        (given,) = workload.data(4, 0)
        assert isinstance(given, PackedBatch)
        order = given.tensors["ids"].argsort(0) if isinstance(data, Columns) else None
        for name, tensor in stacked.items():
            assert given.tensors[name].shape == tensor.shape
            assert order is not None or torch.equal(given.tensors[name], tensor)


def test_a_workload_that_replaces_another_knows_its_rows() -> None:
    """Single samples are put in front when they are stacked, by the packing of the example."""
    own = batch(4)
    stacked = RowPacking((("patches", ROWS, ""),), (("positions", 1),)).packed(own).tensors
    samples = [{name: tensor[i] for name, tensor in stacked.items()} for i in range(4)]
    workload = replace(Workload(Model(), own, **SAID), data=samples)
    (given,) = workload.data(4, 0)
    assert {n: t.shape for n, t in given.tensors.items()} == {
        n: t.shape for n, t in stacked.items()
    }


@pytest.mark.parametrize("example", [{"patches": torch.zeros(4, 6)}, (torch.zeros(4, 6),)])
def test_a_tensor_of_counts_has_to_be_in_the_example(example: Any) -> None:
    """Which is a dict then."""
    with pytest.raises(DataError, match="rows of patches are counted by counts, which the example"):
        Workload(Model(), example, rows={"patches": "counts"})
