"""The asynchronous schedule on local ranks: its order; bit for bit the loop of the definitions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.worker import BatchRun
from anabranch.schedule.schedule import Kind
from anabranch.weights import POLICIES
from tests.runtime.asynchronous.models import batches, cut, halving
from tests.runtime.asynchronous.reference import train
from tests.runtime.asynchronous.running import (
    by_hand,
    fresh,
    held,
    on_ranks,
    pipeline,
    plan_of,
    start_of,
    whole,
)

pytestmark = pytest.mark.dist


def logged(pipe: AsyncPipeline) -> list[str]:
    """Lets a pipeline write down what its rank does; ``*`` is an update."""
    log: list[str] = []
    update: Any = pipe._stream._learn

    def do(run: BatchRun, kind: Kind, microbatch: int) -> None:
        passes(run, kind, microbatch)
        if (kind, microbatch) in run.tasks.passes:
            log.append(f"{kind}{run.number}.{microbatch}")

    def learn(run: BatchRun | None, minibatches: int) -> None:
        update(run, minibatches)
        log.append("-*" if run is None else f"{log.pop()}*")

    passes = BatchRun.do
    BatchRun.do = do  # type: ignore[method-assign]  # in this rank, which ends with the test
    pipe._stream._learn = learn
    return log


def orders(name: str, sizes: Sequence[int], microbatches: int = 1) -> list[str]:
    """Per rank what it does with mini-batches of such sizes."""
    model = cut(name)
    full = max(sizes)
    chosen = plan_of(model, full, microbatches=microbatches)
    data = [{key: value[:size] for key, value in each.items()} for each, size in data_of(sizes)]

    def work() -> str:
        pipe = pipeline(model, chosen, "2bw" if microbatches > 1 else "stash")
        log = logged(pipe)
        list(pipe.steps(data))
        assert not pipe._stream._count
        return " ".join(log)

    return on_ranks(chosen, work)


def data_of(sizes: Sequence[int]) -> list[tuple[Any, int]]:
    return list(zip(batches(len(sizes), max(sizes)), sizes, strict=True))


def test_order_of_a_chain() -> None:
    """Warm-up by depth, then a backward with its update for every forward, then the drain."""
    assert [order.replace(".0", "") for order in orders("chain 3", [4] * 5)] == [
        "F0 F1 F2 B0* F3 B1* F4 B2* B3* B4*",
        "F0 F1 B0* F2 B1* F3 B2* F4 B3* B4*",
        "F0 B0* F1 B1* F2 B2* F3 B3* F4 B4*",
    ]


def test_order_where_branches_have_different_depths() -> None:
    """A branch of one stage is as stale as its distance to the sink says, not as the other one."""
    stem, long, longer, short, head = (o.replace(".0", "") for o in orders("two branches", [4] * 4))
    assert stem == "F0 F1 F2 F3 B0* B1* B2* B3*"
    assert long == "F0 F1 F2 B0* F3 B1* B2* B3*"
    assert longer == short == "F0 F1 B0* F2 B1* F3 B2* B3*"
    assert head == "F0 B0* F1 B1* F2 B2* F3 B3*"


def test_order_with_microbatches() -> None:
    """An update follows the last micro-batch of a mini-batch; the next one's first is under way. A
    mini-batch with fewer drains: behind it the version that 2BW reads would not be there in time.
    """
    first, last = orders("chain 2", [4, 4, 2, 4], microbatches=2)
    assert first == ("F0.0 F0.1 B0.0 F1.0 B0.1* F1.1 B1.0 F2.0 B1.1* B2.0* F3.0 F3.1 B3.0 B3.1*")
    assert last == "F0.0 B0.0 F0.1 B0.1* F1.0 B1.0 F1.1 B1.1* F2.0 B2.0* F3.0 B3.0 F3.1 B3.1*"


def test_a_short_minibatch_alone_drains_nothing() -> None:
    """Where a mini-batch is one micro-batch a short one is one, too."""
    first, _ = orders("chain 2", [4, 3, 4])
    assert first.replace(".0", "") == "F0 F1 B0* F2 B1* B2*"


def cases(name: str, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Policies with optimizers: all on a chain, by momentum; where branches have different depths
    those that look at distances, by moments; ``test_replay`` has every optimizer in one process.
    """
    momentum, other = "momentum", "momentum" if name == "chain 3" else "adam"
    if dtype is torch.float64:
        momentum, other = "nesterov", "nadam"
    only = {"spectrain": momentum, "asyncpp": "long nadam"}
    if name == "chain 3":
        only["basis-rotation"] = "adam"
    few = {
        "two branches": ("stash", "vertical-sync", "spectrain", "pipeoptim"),
        "two sources": ("stash", "pipeoptim", "2bw"),
    }
    policies = few.get(name, tuple(POLICIES))
    return [(policy, only.get(policy, other)) for policy in policies]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("chain 3", torch.float32), ("two branches", torch.float64), ("two sources", torch.float32)],
)
def test_training_is_bitwise_the_reference(name: str, dtype: torch.dtype) -> None:
    """Losses of two fills and all weights after them, under every policy and a schedule of the
    learning rate; fills shorter and longer than the pipeline is deep. Versions are as many as
    policies promise.
    """
    model = cut(name, dtype=dtype)
    data, start = batches(8, 4, dtype), start_of(model)
    chosen = {m: plan_of(model, microbatches=m) for m in (1, 4)}
    wanted = {
        each: cut(name, each[1], dtype=dtype, scheduler=halving) for each in cases(name, dtype)
    }

    def work() -> list[Any]:
        results = []
        for (policy, _), each in wanted.items():
            fresh(model, start)
            plan = chosen[4 if policy.startswith("2bw") else 1]
            pipe = pipeline(model, plan, policy, workload=each.workload)
            losses = [*pipe.steps(data[:3]), *pipe.steps(data[3:])]
            seen = pipe.peak_versions, pipe.weight_bytes, pipe._stream.weights.peak_versions
            results.append((losses, held(pipe), pipe.version_difference, seen))
        return results

    results = on_ranks(chosen[1], work)
    for i, ((policy, optimizer), each) in enumerate(wanted.items()):
        m = 4 if policy.startswith("2bw") else 1
        expected = train(each.by_hand, policy, data, fills=(0, 3), microbatches=m)
        mine = [rank[i] for rank in results]
        assert all(losses == expected for losses, *_ in mine), (policy, optimizer)
        weights, by_loop = whole([parameters for _, parameters, *_ in mine]), by_hand(each)
        assert weights.keys() == by_loop.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, by_loop[key]), (policy, optimizer, key)
        behind = [stage.distance for stage in each.by_hand]
        if m > 1:
            behind = [min(d, 1) for d in behind]
        assert mine[0][2] == tuple(behind)
    heights = chosen[1].stage_graph.height
    seen = {policy: [rank[i][3] for rank in results] for i, (policy, _) in enumerate(wanted)}
    kept = int(("pipeoptim", "nadam") in wanted)  # its last update, as it has no rule
    assert_promised({policy: ranks[0][0] for policy, ranks in seen.items()}, heights, kept)
    parts = [sum(p.nbytes for p in stage.module.parameters()) for stage in model.by_hand]
    for ranks in seen.values():
        versions, nbytes, _ = ranks[0]
        assert nbytes == tuple(v * b for v, b in zip(versions, parts, strict=True))
        assert all(rank[:2] == ranks[0][:2] for rank in ranks)
        assert tuple(own for *_, own in ranks) == versions


def assert_promised(peaks: dict[str, tuple[int, ...]], heights: Sequence[int], kept: int) -> None:
    """PipeOptim's Table II, measured: stashing up to D, 2BW and SpecTrain 2, PipeOptim 1 to 2 and
    the updates that are kept for its prediction.
    """
    promised = {
        "naive": (1,) * len(heights),
        "stash": tuple(h + 1 for h in heights),
        "vertical-sync": (max(heights) + 1,) * len(heights),
        "2bw": (2,) * len(heights),
        "spectrain": (2,) * len(heights),
        "pipeoptim": tuple(min(h, 1) * (1 + kept) + 1 for h in heights),
        "2bw-ef": (3,) * len(heights),
        "basis-rotation": tuple(h + 3 for h in heights),
    }
    found = {policy: each for policy, each in peaks.items() if policy in promised}
    assert found == {policy: promised[policy] for policy in found}
