"""Sums of gradients while backwards go on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.cost import buckets
from anabranch.runtime.data_feed import leaves_of
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.reducer import Reducer
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks.mesh import Mesh
from tests.runtime.small import batch, built, num_ranks, plan, with_programs
from tests.runtime.training import run

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter each."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("TwoBranch", {"num_stages": 2, "replicas": [2, 2]}),
    ("Tied", {"num_stages": 2, "replicas": [1, 1]}),
    ("Unused", {"num_stages": 1, "replicas": [2]}),
    ("Detached", {"num_stages": 2, "replicas": [1, 1]}),
]


@pytest.mark.parametrize(("name", "options"), PLANS)
def test_sums_are_those_of_afterwards(
    name: str, options: dict[str, Any], small_buckets: None
) -> None:
    """Two holders add the same two numbers, so every bit is equal; a sample less than there are
    replicas leaves one of them without a backward.
    """
    model = with_programs(built(name), 1, 3)
    chosen = plan(model, **options)

    def compared(pipeline: Pipeline, samples: int) -> tuple[list[str], list[str]]:
        leaves = batch(samples, 3)
        _, found = pipeline.gradients(leaves)
        found = {key: value.clone() for key, value in found.items()}
        pipeline._state.forget_gradients()
        worker = pipeline._session.workers.worker(samples)
        worker.run(leaves_of(model.captured, leaves, CPU), 0)
        parameters = pipeline._state.parameters
        afterwards = Reducer(parameters, pipeline._session.holders, pipeline._mesh)
        afterwards.sum_now(everywhere=True)
        expected = {key: p.grad for key, p in parameters.items() if p.grad is not None}
        wrong = [key for key, g in expected.items() if not torch.equal(g, found[key])]
        pipeline._state.forget_gradients()
        return sorted(found.keys() ^ expected.keys()), wrong

    ranks = run(model, chosen, lambda pipeline: [compared(pipeline, n) for n in (11, 1)])
    assert ranks == [[([], [])] * 2] * num_ranks(chosen)


def test_sums_start_during_the_backward_in_one_order(small_buckets: None) -> None:
    """The last layer's is on its way when the first layer has no gradient yet. Both ranks of a set
    start the same buckets, one after the other.
    """
    model = built("Chain")
    chosen = plan(model, 1, replicas=[2])

    def work(pipeline: Pipeline) -> list[tuple[str, int]]:
        log = []
        mesh, reducer = pipeline._mesh, pipeline._updates.reducer
        start = mesh.start_all_reduce
        names = {b.named[0][0]: b for queue in reducer._queues for b in queue.buckets}

        def noting(tensor: Tensor, ranks: tuple[int, ...] | None = None) -> Any:
            for name, bucket in names.items():
                if bucket.flat is tensor:
                    log.append((name, len(reducer._waiting)))
            return start(tensor, ranks)

        mesh.start_all_reduce = noting  # type: ignore[method-assign]
        pipeline.gradients(batch(16))
        return log

    first, second = run(model, chosen, work)
    assert first == second
    names = [name for name, _ in first]
    assert names == [n for n, _ in reversed(list(model.module.named_parameters()))]
    assert [left for _, left in first] == list(reversed(range(len(names))))


def test_buffers_are_kept_and_one_holder_has_none() -> None:
    """Stage 0 has two replicas, stage 1 one."""
    model = built("Chain")
    chosen = plan(model, 2, replicas=[2, 1])

    def work(pipeline: Pipeline) -> tuple[bool, int]:
        slots = pipeline._updates.reducer._slots
        pointers = []
        for seed in range(2):
            pipeline.gradients(batch(16, seed))
            parameters = pipeline._state.parameters
            pointers.append([g.data_ptr() for n in slots if (g := parameters[n].grad) is not None])
        return pointers[0] == pointers[1], len(pointers[0])

    same, counts = zip(*run(model, chosen, work), strict=True)
    assert same == (True, True, True)
    assert counts[0] == counts[1] > 0 == counts[2]


def test_gradients_grow_where_they_are_summed() -> None:
    """Between two batches of one update those of a replicated stage take no other memory."""
    model = built("Chain")
    chosen = plan(model, 1, replicas=[2])

    def work(pipeline: Pipeline) -> bool:
        pipeline._updates.accumulate = 2
        pipeline.step(batch(16))
        flats = {flat.untyped_storage().data_ptr() for flat in pipeline._updates.reducer.buffers}
        gradients = pipeline._state.gradients()
        return {g.untyped_storage().data_ptr() for g in gradients} == flats != set()

    assert run(model, chosen, work) == [True, True]


def test_after_an_interrupted_batch_sums_are_whole(small_buckets: None) -> None:
    """A batch ends in the middle of its last backward on both ranks: what it began is forgotten."""
    model = built("Chain")
    chosen = plan(model, 1, replicas=[2])

    def work(pipeline: Pipeline) -> bool:
        expected = {k: g.clone() for k, g in pipeline.gradients(batch(16))[1].items()}
        reducer = pipeline._updates.reducer
        final, left = reducer._is_final, [2]

        def interrupted(name: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            final(name)

        reducer._is_final = interrupted  # type: ignore[method-assign]
        worker = pipeline._session.workers.worker(16)
        pipeline._updates.prepare(worker, 16, alone=True)
        with pytest.raises(KeyboardInterrupt):
            worker.run(leaves_of(model.captured, batch(16, 5), CPU), 0, watcher=reducer)
        del reducer._is_final
        found = pipeline.gradients(batch(16))[1]
        return all(torch.equal(found[key], value) for key, value in expected.items())

    assert run(model, chosen, work) == [True, True]


def test_hooks_count_in_batches_and_go_with_the_reducer() -> None:
    """A backward outside of a batch leaves its gradient where autograd puts it, and a parameter
    that outlives its reducer has no hook of it.
    """
    weight = nn.Parameter(torch.ones(2))
    holders = Holders({"weight": (0, 1)}, {}, {"weight": (0,)})
    reducer = Reducer({"weight": weight}, holders, Mesh(range(1)))

    def is_moved(reducer: Reducer) -> bool:
        weight.grad = None
        torch.autograd.backward(weight.sum())
        return any(weight.grad.data_ptr() == flat.data_ptr() for flat in reducer.buffers)

    reducer.begin((0,), is_last=False)
    assert is_moved(reducer)
    reducer.after_last(0)
    assert not is_moved(reducer)
    reducer.begin((0,), is_last=False)
    assert is_moved(reducer)
    assert len(weight._post_accumulate_grad_hooks) == 1
    del reducer
    assert not weight._post_accumulate_grad_hooks
