"""Sequences of several lengths: a plan trains batches of every declared size."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch import Columns, launch, pad_to_bucket
from anabranch.errors import CaptureError, DataError
from anabranch.graph.capture import capture
from anabranch.plans.plan import ModelSize
from anabranch.runtime import first_batch
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import prepare
from anabranch.runtime.reference import reference
from anabranch.runtime.worker_cache import WorkerCache
from anabranch.verification import verify
from anabranch.workload import Workload
from tests.runtime.small import Built, num_ranks, plan
from tests.runtime.training import LIMIT_S, sgd

LENGTHS = (5, 10)
WORDS, WIDTH = 12, 8
FILL = {"tokens": 0, "mask": 0, "label": -100}


class Padded(nn.Module):
    """A transformer layer with a padding mask and positions; its loss counts what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(max(LENGTHS), WIDTH) / 4)
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor, label: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        shown = (mask == 1)[:, None]
        x = x + F.scaled_dot_product_attention(self.queries(x), self.keys(x), x, shown)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), label.flatten())


class Summed(nn.Module):
    """A Python loop over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.body(x[:, i, None]) for i in range(x.shape[1])).square().mean()


def batch(samples: int, longest: int, seed: int = 0) -> dict[str, Tensor]:
    """Sequences of at least two tokens, one of which is the longest, padded to their bucket."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (samples,), generator=draw)
    lengths[seed % samples] = longest
    mask = (torch.arange(longest) < lengths[:, None]).long()
    tokens = torch.randint(WORDS, (samples, longest), generator=draw) * mask
    label = torch.where(mask == 1, tokens.roll(-1, 1), -100)
    return pad_to_bucket({"tokens": tokens, "mask": mask, "label": label}, LENGTHS, FILL)


@cache
def built() -> Built:
    torch.manual_seed(0)
    module, example = Padded(), batch(4, 10)
    workload = Workload(module, example, buckets=[batch(4, 5)], optimizer=sgd)
    return Built(capture(module, example), workload)


@pytest.mark.dist
def test_gradients_are_those_of_one_process_in_every_bucket() -> None:
    """With replicas and a short micro-batch at the end, in any order of buckets; the check before
    the first step compares an example of each. Evaluation likewise; ``verify`` tells the worst.
    """
    model = built()
    chosen = plan(model, 2, batch_size=5, microbatch_size=2, replicas=[2, 1])
    held_out = replace(model.workload, eval_data=lambda size: iter(()))
    prepare(model.captured, chosen.stage_graph, held_out)
    given = [batch(5, longest, seed) for seed, longest in enumerate([10, 4, 5, 7])]
    assert [some["tokens"].shape[1] for some in given] == [10, 5, 5, 10]

    def rank() -> tuple[list[Any], float, str]:
        found = []
        pipeline = Pipeline(model.workload, chosen, captured=model.captured, timeout=20.0)
        for some in given:
            loss, gradients = pipeline.gradients(some)
            found.append((loss, {n: g.clone() for n, g in gradients.items()}))
        return found, pipeline.evaluate(given)["loss"], pipeline.gradient_verdict

    ranks = launch.run(rank, num_ranks(chosen), timeout=LIMIT_S)
    losses = []
    for i, some in enumerate(given):
        expected = reference(model.module, some, [(0, 5)])
        losses.append(expected.loss)
        gradients = {n: g for found, _, _ in ranks for n, g in found[i][1].items()}
        assert ranks[0][0][i][0] == pytest.approx(expected.loss, rel=1e-6)
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            assert float((gradients[name] - gradient).abs().max()) < 1e-6 * largest
    assert ranks[0][1] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert ranks[0][2].startswith("right")
    # A plan is for the size of the example, and no other bucket is warned of.
    sized = replace(plan(model, 1), model_size=ModelSize.of(model.captured.graph))
    result = verify(model.workload, sized, captured=model.captured)
    assert result.is_good
    assert result.notes == ("the largest difference of 2 sizes of batches",)


def test_training_without_a_flush_takes_buckets() -> None:
    """On one device it is plain training: the same losses as with a flush."""
    model = built()
    given = [batch(4, longest, longest) for longest in (10, 4, 7, 5)]
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    losses = []
    for kind in (Pipeline, AsyncPipeline):
        model.module.load_state_dict(before)
        pipeline = kind(model.workload, plan(model, 1), captured=model.captured)
        losses.append(list(pipeline.steps(given)))
    model.module.load_state_dict(before)
    assert losses[0] == losses[1]


def test_the_first_check_compares_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's size as well, where the first batch is a short one."""
    model, compared = built(), []

    def compare(steps: WorkerCache, *_: Any) -> str:
        compared.append(steps.captured.layout.sizes[0])
        return "right"

    monkeypatch.setattr(first_batch, "compare_with_eager", compare)
    pipeline = Pipeline(model.workload, plan(model, 1), captured=model.captured)
    pipeline.gradients(batch(4, 4))
    assert compared == [(5,), (10,)]


def test_ranks_read_every_column_where_there_are_buckets() -> None:
    """A column that a rank leaves out would have the example's size, and its batch no bucket's."""
    model = built()
    short = batch(8, 4)
    data = Columns({name: leaf.__getitem__ for name, leaf in short.items()}, length=8)
    workload = replace(model.workload, data=data)
    pipeline = Pipeline(workload, plan(model, 1), captured=model.captured, check_gradients=False)
    pipeline._session.feed.reads = lambda: {"tokens"}
    first = next(pipeline.batches())
    assert [leaf.shape[1] for leaf in first.values()] == [5, 5, 5]


def test_what_fits_no_bucket_is_refused() -> None:
    """A batch that is too long to pad, one that nobody padded, and a bucket larger than the example
    that plans count with.
    """
    model = built()
    with pytest.raises(DataError, match=r"sequences of .* 11, longer than all buckets"):
        batch(4, 11)
    pipeline = Pipeline(model.workload, plan(model, 1), captured=model.captured)
    mixed = batch(4, 5) | {"label": batch(4, 10)["label"]}
    with pytest.raises(
        DataError, match=r"no bucket has tokens \[samples, 5\] int64, mask .* togeth"
    ):
        pipeline.step(mixed)
    short = {name: leaf[:, :7] for name, leaf in batch(4, 10).items()}
    text = r"tokens is \[samples, 7\] int64, not \[samples, 5\] int64 or \[samples, 10\] int64"
    with pytest.raises(DataError, match=text):
        pipeline.step(short)
    narrow = batch(4, 5) | {"tokens": batch(4, 5)["tokens"].int()}
    with pytest.raises(DataError, match=r"tokens is \[samples, 5\] int32, not .* pad .* convert"):
        pipeline.step(narrow)
    turned = Workload(model.module, batch(4, 5), buckets=[batch(4, 10)])
    with pytest.raises(DataError, match="make the largest of them the example"):
        Pipeline(turned, plan(model, 1), captured=capture(model.module, turned.example))


def test_a_loop_over_the_length_is_refused() -> None:
    """A bucket has other operations then, which no stage of the plan holds."""
    captured = capture(Summed(), {"x": torch.zeros(2, 4)})
    with pytest.raises(CaptureError, match=r"Summed runs other operations for a bucket \(x \["):
        captured.like({"x": torch.zeros(2, 3)})
