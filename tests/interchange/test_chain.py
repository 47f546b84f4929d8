"""What PyTorch's pipelining can express of a plan, and the reasons for the rest."""

from dataclasses import replace

import pytest

from anabranch.errors import NotExpressibleError
from anabranch.interchange.chain import chain_of
from anabranch.plans.plan import Plan
from tests.interchange.models import chain
from tests.runtime.small import Built, built, on_devices, plan


def refused(model: Built, chosen: Plan) -> str:
    with pytest.raises(NotExpressibleError) as caught:
        chain_of(chosen, model.captured.graph)
    return str(caught.value)


def test_the_schedule_has_a_line_for_each_rank():
    """Of 1F1B, by eye; a device with two stages has the actions of both."""
    model = built("Chain")
    found = chain_of(plan(model, 2, batch_size=8), model.captured.graph)
    assert found.csv == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (found.ranks, found.replicas, found.microbatch_size) == ((0, 1), 1, 4)
    looped = on_devices(plan(model, 4), [(1,), (0,), (1,), (0,)])
    found = chain_of(looped, model.captured.graph)
    assert found.ranks == (0, 1, 0, 1)
    assert {cell[0] for cell in found.csv.splitlines()[0].split(",")} == {"0", "2"}


def test_replicas_are_whole_pipelines():
    """Each has half of every micro-batch."""
    model = built("Chain")
    found = chain_of(plan(model, 2, replicas=[2, 2]), model.captured.graph)
    assert (found.replicas, found.microbatch_size, found.num_ranks) == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("TwoBranch", {}, "its stages form a graph"),
        ("Shared", {}, "stage 2 reads a value of stage 0, and PyTorch sends to the next only"),
        ("Tied", {}, "share the weight words.weight, whose gradient PyTorch adds up nowhere"),
        ("Chain", {"microbatch_size": [4, 8, 8]}, "micro-batches of 4 and 8 samples"),
        ("Chain", {"microbatch_size": 6}, "the last micro-batch of 16 samples is smaller"),
        ("Chain", {"replicas": [1, 2, 2]}, "1 and 2 replicas"),
        ("Chain", {"replicas": [3, 3, 3]}, "3 replicas have unequal slices"),
    ],
)
def test_reasons(name: str, options: dict[str, object], reason: str):
    """Each of them is said, with the numbers."""
    model = built(name)
    assert reason in refused(model, plan(model, 3, **options))


def test_the_way_on_is_one_that_works():
    """One stage can be read, of any model; a row of stages cannot where values pass over one."""
    model = built("Shared")
    said = refused(model, plan(model, 3))
    assert "--planner data-parallel --rewrite none has one stage" in said
    assert "sends to the next stage only" in said
    assert "--planner sequential" not in said  # it is a row already
    branched = built("TwoBranch")
    assert "--planner sequential" in refused(branched, plan(branched, 3))
    whole = chain_of(plan(model, 1, replicas=[2]), model.captured.graph)
    assert (whole.num_ranks, whole.replicas) == (1, 2)


def test_reasons_beyond_the_shape():
    """No flush, a rewritten model, devices that only some stages share."""
    model = built("Chain")
    chosen = plan(model, 2)
    assert "it is asynchronous (stash)" in refused(
        model, replace(chosen, mode="async", policy="stash")
    )
    assert "rewrites the model (join-split)" in refused(
        model, replace(chosen, rewrites=("join-split",))
    )
    shared = on_devices(plan(model, 2, replicas=[2, 2]), [(0, 1), (1, 2)])
    assert "on PyTorch's ranks all or none" in refused(model, shared)


def test_samples_of_the_whole_batch():
    """One micro-batch alone would do."""
    model = chain("blocks")
    graph = model.captured.graph
    ops = (*graph.ops[:-1], replace(graph.ops[-1], whole_batch=True))
    with pytest.raises(NotExpressibleError, match="compares samples of the whole batch"):
        chain_of(plan(model, 2), replace(graph, ops=ops))
