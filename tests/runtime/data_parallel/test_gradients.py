"""Gradients between backward and update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import launch
from anabranch.cost import buckets
from anabranch.runtime.data_parallel.gradients import (
    Holders,
    clip,
    same_start,
    share_first,
    sum_of_squares,
)
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.plan_parts import parts_of
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.placement import fetched
from tests.runtime.small import built, plan

ALONE: Any = SimpleNamespace(size=1, rank=0)


def parameter(*values: float | None) -> nn.Parameter:
    """One whose gradient has these values; None for no gradient."""
    result = nn.Parameter(torch.zeros(len(values)))
    if None not in values:
        result.grad = torch.tensor(values)
    return result


def test_holders_are_replicas_and_the_stages_that_share() -> None:
    """Tied: the embedding is read in every stage; stage 0 has two replicas, so ranks 0, 1, 2 and 3
    hold it.
    """
    model = built("Tied")
    chosen = plan(model, 3, replicas=[2, 1, 1])
    parts = parts_of(model.captured, chosen, exact=False)
    holders = Holders.of(parts, chosen.stage_graph)
    assert holders.parameters["words.weight"] == (0, 1, 2, 3)
    assert holders.owner("words.weight") == 0
    assert set(holders.parameters.values()) <= {(0, 1, 2, 3), (0, 1), (2,), (3,)}
    assert (2,) not in holders.sets


def test_clipping_equals_torch() -> None:
    """The norm is over all parameters: 3, 4 and 12 make 13."""
    ours = {"a": parameter(3.0, 4.0), "b": parameter(12.0), "c": parameter(None)}
    theirs = [parameter(3.0, 4.0), parameter(12.0), parameter(None)]
    holders = Holders(dict.fromkeys(ours, (0,)), {}, {})
    (squares,) = fetched(sum_of_squares(ours, holders, 0))
    assert squares == pytest.approx(169.0)
    clip(ours, squares, 2.0)
    torch.nn.utils.clip_grad_norm_(theirs, 2.0)
    for mine, other in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_small_gradients_are_not_scaled_up() -> None:
    ours = {"a": parameter(3.0, 4.0)}
    clip(ours, 25.0, 6.0)
    assert ours["a"].grad is not None
    assert ours["a"].grad.tolist() == [3, 4]


def test_a_copy_is_counted_once() -> None:
    """Rank 1 holds a replica of what rank 0 speaks for."""
    holders = Holders({"a": (0, 1), "b": (1,)}, {}, {})
    found = sum_of_squares({"a": parameter(3.0), "b": parameter(4.0)}, holders, 1)
    assert fetched(found) == [16.0]


@pytest.mark.dist
def test_sums_run_over_the_holders_only() -> None:
    """a is held by ranks 0 and 1, b by 1 and 2, c by 0 alone; buckets of one parameter each and of
    all give the same.
    """
    holders = Holders(
        {"a": (0, 1), "b": (1, 2), "c": (0,), "d": (0, 1)}, {}, dict.fromkeys("abcd", (0,))
    )

    def work() -> list[dict[str, list[float] | None]]:
        mesh, found = Mesh((0, 1, 2), holders.sets, timeout=20.0), []
        rank = float(mesh.rank)
        for nbytes in (buckets.BUCKET_BYTES, 8):
            buckets.BUCKET_BYTES = nbytes
            held = (n for n, r in holders.parameters.items() if rank in r)
            mine = {n: parameter(rank + 1, 10.0) for n in held}
            if "d" in mine:
                mine["d"].grad = None
            Reducer(mine, holders, mesh).sum_now()
            found.append({n: None if p.grad is None else p.grad.tolist() for n, p in mine.items()})
        return found

    expected = [
        {"a": [3, 20], "c": [1, 10], "d": None},
        {"a": [3, 20], "b": [5, 20], "d": None},
        {"b": [5, 20]},
    ]
    assert launch.run(work, 3, timeout=30.0) == [[each] * 2 for each in expected]


@pytest.mark.dist
def test_a_gradient_on_one_holder_is_the_sum() -> None:
    """A short micro-batch may leave the other replica without samples."""
    holders = Holders({"a": (0, 1)}, {}, {"a": (0,)})

    def work() -> list[float]:
        mesh = Mesh((0, 1), holders.sets, timeout=20.0)
        mine = {"a": parameter(2.0) if mesh.rank else parameter(None)}
        Reducer(mine, holders, mesh).sum_now()
        assert mine["a"].grad is not None
        return mine["a"].grad.tolist()

    assert launch.run(work, 2, timeout=30.0) == [[2.0], [2.0]]


@pytest.mark.dist
def test_weights_start_as_those_of_rank_0_and_buffers_are_those_of_the_first_holder() -> None:
    """Ranks that built the model from another seed, or whose replicas saw other samples."""

    def work() -> tuple[list[float], list[float]]:
        mesh = Mesh((0, 1, 2), {(1, 2)}, timeout=20.0)
        rank = float(dist.get_rank())
        weight, same = torch.tensor([rank, 1.0]), torch.tensor([5.0])
        same_start({"weight": weight, "same": same}, mesh)
        buffer = torch.tensor([rank])
        if mesh.rank > 0:
            share_first({"mean": buffer}, {"mean": (1, 2)}, mesh)
        return weight.tolist(), buffer.tolist()

    assert launch.run(work, 3, timeout=30.0) == [([0, 1], [0.0]), ([0, 1], [1.0]), ([0, 1], [1.0])]
