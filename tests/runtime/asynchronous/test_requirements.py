"""What asynchronous training asks of a plan and a workload, and how it says so."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.errors import DataError, InvalidPlanError, PolicyError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import choose, endless, require_recipes
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from tests.runtime.small import batch, built, num_ranks, plan, with_options

plain_sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("options", "compute", "policy", "message"),
    [
        ({"clip_norm": 2.0}, PLAIN, None, r"clip_norm 2 .* \(--clip-stage-norm\)"),
        ({}, ComputeOptions(precision="fp16"), None, "take bf16"),
        ({}, PLAIN, "spectrain", "the optimizer is AdamW"),
        ({}, PLAIN, "none", "unknown policy 'none'; there are naive, stash"),
    ],
)
def test_recipes_are_refused_without_a_plan(options, compute, policy, message) -> None:
    """All that a workload and a policy say by themselves."""
    workload = with_options(built("TwoBranch"), **options)
    with pytest.raises(PolicyError, match=message):
        require_recipes(workload, compute, policy)


def test_recipes_that_do() -> None:
    """In silence: of an optimizer without momentum rank 0 tells, where training begins."""
    workload = with_options(built("TwoBranch"), optimizer=plain_sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_recipes(workload, PLAIN, "pipeoptim")
        require_recipes(workload, PLAIN)


@pytest.mark.dist
def test_an_unknown_policy_is_a_policy_error_on_ranks_too() -> None:
    """It used to look like a rank that had failed."""
    model = built("TwoBranch")
    chosen = plan(model, 2, microbatch_size=16)

    def rank() -> None:
        AsyncPipeline(model.workload, chosen, policy="none", captured=model.captured)

    with pytest.raises(PolicyError, match="unknown policy 'none'"):
        launch.run(rank, num_ranks(chosen), timeout=60.0)


@pytest.mark.dist
def test_an_optimizer_without_momentum_is_told_of_by_rank_0_alone() -> None:
    """Both ranks predict, and would say the same."""
    model = built("TwoBranch")
    chosen = plan(model, 2, microbatch_size=16)
    workload = with_options(model, optimizer=plain_sgd)

    def rank() -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            AsyncPipeline(workload, chosen, policy="pipeoptim", captured=model.captured)
        return [str(each.message) for each in told if "momentum" in str(each.message)]

    first, second = launch.run(rank, num_ranks(chosen), timeout=60.0)
    assert len(first) == 1
    assert second == []


class Late(torch.optim.SGD):
    """Rank 1 takes its time, so that the others have left before it comes to the bad batch."""

    def step(self, closure: Any = None) -> Any:
        """See ``Optimizer``."""
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return super().step(closure)


@pytest.mark.dist
def test_a_bad_batch_in_the_stream_is_the_same_error_on_all_ranks() -> None:
    """All leave behind the same mini-batch, and part from each other as those do who leave a loop:
    one that is late needs the messages of those that have left.
    """
    model = built("TwoBranch")
    chosen = plan(model, 3, microbatch_size=16)
    workload, parted = with_options(model, optimizer=partial(Late, lr=0.1)), []

    def rank() -> tuple[list[float], str, list[int]]:
        pipe = AsyncPipeline(
            workload, chosen, policy="stash", captured=model.captured, check_gradients=False
        )
        leave = pipe._leave

        def noted() -> None:
            parted.append(pipe.step_number)
            leave()

        pipe._leave = noted  # type: ignore[method-assign]
        good = [batch(16, i) for i in range(6)]
        losses: list[float] = []
        with pytest.raises(DataError) as caught:
            losses.extend(pipe.steps([*good, batch(16) | {"x": torch.zeros(16, 9)}]))
        return losses, str(caught.value), parted

    first, *others = launch.run(rank, num_ranks(chosen), timeout=60.0)
    assert "x is [samples, 9]" in first[1]
    assert first[2] == [6]
    assert others == [first, first]


def test_micro_batches_of_several_sizes_are_named():
    """In a plan made by hand, whose counts in flight nobody could decide."""
    chosen = plan(built("TwoBranch"), 3, batch_size=4, microbatch_size=4)
    first, *others = chosen.stage_graph.stages
    stages = (replace(first, microbatch_size=2, in_flight=0), *others)
    uneven = replace(chosen.stage_graph, stages=stages)
    with pytest.raises(InvalidPlanError, match="micro-batches of 2, 4, 4 samples"):
        endless(replace(chosen, mode="async", policy="stash", stage_graph=uneven))


def test_auto_knows_of_the_update_that_is_kept():
    """RMSprop has no rule, so its last update is the third copy."""
    workload = with_options(built("TwoBranch"), optimizer=torch.optim.RMSprop)
    chosen = plan(built("TwoBranch"), 3, batch_size=4, microbatch_size=4)
    policy, reason = choose("auto", chosen, 1, workload)
    assert policy.name == "pipeoptim"
    assert "the last update of RMSprop, which is kept," in reason
    assert "at most 3 copies" in reason
