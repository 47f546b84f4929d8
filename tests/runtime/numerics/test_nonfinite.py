"""Numbers that are not finite: which step is refused, and what is named."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import NonFiniteError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.numerics.nonfinite import Finding, bad_names
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from tests.runtime.small import WIDTH, Batch, Built, batch, plan
from tests.runtime.training import on_one_device, run, run_each

ACTIVATION, LOSS, GRADIENT, PARAMETER = range(4)


def test_what_looks_bad_is_looked_at_again() -> None:
    """1e30 is finite in float32, its norm is not. Empty and sparse gradients count as they are."""
    bad = torch.ones(3)
    bad[1] = float("nan")
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([float("inf")]), (4,), check_invariants=True
    )
    gradients = {
        "large": torch.full((4,), 1e30),
        "good": torch.ones(2, 2),
        "bad": bad,
        "half": torch.tensor([float("-inf")], dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "sparse": sparse,
    }
    assert sorted(bad_names(gradients)) == ["bad", "half", "sparse"]
    assert bad_names({}) == []


def test_findings_sort_by_what_may_be_the_cause() -> None:
    """Forward before backward; along the stages, then against them; what left a stage before its
    loss; a parameter whose micro-batch is not known last of its stage.
    """
    ordered = [
        Finding(0, 0, 3, ACTIVATION, 5),
        Finding(0, 2, 1, ACTIVATION, 0),
        Finding(0, 2, 1, LOSS, -1),
        Finding(1, -2, 1, GRADIENT, 5),
        Finding(1, -1, 0, GRADIENT, 5),
        Finding(1, -1, 2**31, PARAMETER, 0),
        Finding(1, 0, 0, GRADIENT, 0),
    ]
    assert all(a < b for a, b in pairwise(ordered))


class Fragile(nn.Module):
    """Goes wrong in one of four places, where ``word`` of a sample is 9."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.root = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor, kind: Tensor) -> Tensor:
        hit = (word == 9).unsqueeze(1)
        h = torch.tanh(self.first(x))
        # 1: an activation is NaN. 2: minus infinity, which the next stage takes away.
        h = h.masked_fill(hit & (kind == 1).unsqueeze(1), float("nan"))
        h = h.masked_fill(hit & (kind == 2).unsqueeze(1), float("-inf"))
        h = self.second(torch.exp(h))
        # 3: the gradient of h is NaN. 4: that of a parameter alone.
        third = torch.where(hit & (kind == 3).unsqueeze(1), 0.0, 1.0)
        h = h + torch.sqrt(torch.square(h) * third)
        fourth = torch.where(hit & (kind == 4).unsqueeze(1), 0.0, 1.0)
        h = h + torch.sqrt(torch.square(self.root) * fourth)
        return F.cross_entropy(self.head(h), label)


def fragile(samples: int, kind: int) -> Batch:
    """Sample 9 is the one that is hit."""
    made = batch(samples)
    made["word"] = torch.arange(samples)
    return made | {"kind": torch.full((samples,), kind)}


@pytest.fixture(scope="module")
def model() -> Built:
    torch.manual_seed(0)
    module, example = Fragile(), fragile(4, 0)
    return Built(capture(module, example, granularity="operator"), Workload(module, example))


def errors(
    model: Built,
    work: Callable[[Pipeline], Any],
    *,
    stages: int = 3,
    replicas: list[int] | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> list[Any]:
    """What the pipelines of the ranks come to."""
    workload = replace(model.workload, clip_norm=clip_norm)
    chosen = plan(model, stages, replicas=replicas)
    chosen = replace(chosen, granularity=model.captured.granularity)
    return run(model, chosen, work, workload=workload, **options)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("clip_norm", "replicas", "exact"),
    [(None, None, False), (1.0, None, True), (None, [1, 2, 1], False)],
)
def test_what_and_where_is_named_before_the_update(
    model: Built, clip_norm: float | None, replicas: list[int] | None, exact: bool
) -> None:
    """Sample 9 is in micro-batch 2 of 4 samples. The text is the same everywhere, parameters stay,
    and the next batch trains.
    """

    def work(pipe: Pipeline) -> list[str]:
        texts = []
        before = {n: p.detach().clone() for n, p in pipe._state.parameters.items()}
        for kind in (1, 3, 4):
            with pytest.raises(NonFiniteError) as caught:
                pipe.step(fragile(16, kind))
            texts.append(str(caught.value))
        assert all(torch.equal(p, before[n]) for n, p in pipe._state.parameters.items())
        assert pipe.step(fragile(16, 0)) < 100
        return texts

    results = errors(model, work, clip_norm=clip_norm, replicas=replicas, exact=exact)
    assert all(texts == results[0] for texts in results)
    activation, gradient, parameter = results[0]
    assert activation.startswith("the activation ")
    assert gradient.startswith("the gradient of ")
    assert parameter.startswith("the gradient of parameter root is not finite in step 0: stage")
    for text in (activation, gradient):
        assert "micro-batch 2 is the first; no parameter was changed in this step" in text
    assert "is the first, over all its micro-batches; no parameter was changed" in parameter


@pytest.mark.dist
def test_what_is_bad_once_is_named_where_it_was(model: Built) -> None:
    """One number of one micro-batch, on the second of four stages, which nothing in the batch or
    the weights explains.
    """

    def work(name: str, pipe: Pipeline) -> str:
        compute, is_backward = pipe._session.workers.worker(16).compute, name != "_call"
        whole, left = getattr(compute, name), [1]

        def once(piece: Any, key: tuple[int, int], *rest: Any) -> Any:
            made = whole(piece, key, *rest)
            if key == (1, 2) and left:
                left.clear()
                damaged = next(iter(made.values())) if is_backward else made[0]
                damaged.data.view(-1)[3] = float("nan")  # autograd must not know
            return made

        setattr(compute, name, once)
        with pytest.raises(NonFiniteError) as caught:
            pipe.step(fragile(16, 0))
        return str(caught.value)

    places = {"_call": "the activation", "_differentiate": "the gradient of the activation"}
    chosen = replace(plan(model, 4), granularity=model.captured.granularity)
    results = run_each(model, chosen, *((partial(work, name), {}) for name in places))
    for texts, what in zip(results, places.values(), strict=True):
        assert len(set(texts)) == 1
        assert texts[0].startswith(what)
        assert "stage 1, micro-batch 2 is the first; no parameter was changed" in texts[0]


@pytest.mark.dist
def test_an_infinity_that_is_taken_away_again_does_no_harm(model: Built) -> None:
    """exp(-inf) is 0: one process trains on, and so does the pipeline."""

    def work(pipe: Pipeline) -> list[float]:
        return [pipe.step(fragile(16, 2)), pipe.step(fragile(16, 0))]

    results = errors(model, work)
    assert all(losses == results[0] for losses in results)
    assert all(0 < loss < 100 for loss in results[0])


@pytest.mark.dist
def test_without_a_barrier_no_stage_takes_a_bad_gradient(model: Built) -> None:
    """Of a loss that is not finite, and of one parameter alone: ranks that have it leave their
    update out, and all ranks hear of it one step later. Others have made theirs: there is no going
    on, and nothing to save.
    """

    def work(kind: int, pipe: Pipeline) -> tuple[str, int, int]:
        losses: list[float] = []
        with pytest.raises(NonFiniteError) as caught:
            losses.extend(pipe.steps(fragile(16, k) for k in (0, 0, kind, 0, 0)))
        assert all(bool(p.isfinite().all()) for p in pipe._state.parameters.values())
        with pytest.raises(TrainingError, match="belong to no step; resume from a checkpoint"):
            pipe.step(fragile(16, 0))
        with pytest.raises(TrainingError, match="belong to no step"):
            pipe.save("never written")
        return str(caught.value), len(losses), pipe.step_number

    chosen = replace(plan(model, 3), granularity=model.captured.granularity)
    loss, parameter = run_each(model, chosen, *((partial(work, kind), {}) for kind in (1, 4)))
    for results in (loss, parameter):
        assert len(set(results)) == 1
        assert results[0][1:] == (2, 4)
        assert "; other stages may have been updated" in results[0][0]
    assert "is not finite in step 2: stage" in loss[0][0]
    assert "micro-batch 2 is the first" in loss[0][0]
    assert "parameter root is not finite in step 2: stage" in parameter[0][0]
    assert "over all its micro-batches" in parameter[0][0]


@pytest.mark.dist
def test_a_bad_batch_of_several_is_named_when_it_ran(model: Built) -> None:
    """Not first when the update is due; all batches of the update are dropped."""

    def work(pipe: Pipeline) -> tuple[str, int]:
        with pytest.raises(NonFiniteError) as caught:
            pipe.step(fragile(16, 4))
        pipe.step(fragile(16, 0))
        return str(caught.value), pipe._updates.accumulated

    results = errors(model, work, accumulate=3)
    assert len(set(results)) == 1
    assert "step 0" in results[0][0]
    assert results[0][1] == 1


class Ignoring(nn.Module):
    """A mean over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), label, ignore_index=0)


def test_a_mean_over_no_labels_is_not_blamed_on_the_learning_rate_alone() -> None:
    """In one micro-batch there may be none; in a whole batch 0 / 0 is not finite."""
    _, pipeline = on_one_device(Ignoring(), batch)
    some = batch(8)
    some["label"][2:4] = 0
    assert pipeline.step(some) > 0
    with pytest.raises(NonFiniteError, match="leave out batches whose labels are all ignored"):
        pipeline.step(some | {"label": torch.zeros_like(some["label"])})
