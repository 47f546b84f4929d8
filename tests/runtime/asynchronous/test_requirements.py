"""What asynchronous training asks of a plan and a workload, and how it says so."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from anabranch import launch
from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.plans.plan import Plan, Prediction
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import (
    asynchronous_stages,
    budgeted,
    choose,
    order_of,
    require_recipes,
)
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.weights import PredictStash, Stash
from tests.runtime import small
from tests.runtime.asynchronous.models import batches, cut
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.asynchronous.running import (
    fresh,
    on_ranks,
    pipeline,
    plan_of,
    refusals,
    start_of,
)
from tests.runtime.small import built, num_ranks, plan, with_options

plain_sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("options", "compute", "policy", "message"),
    [
        (
            {"clip_norm": 2.0},
            PLAIN,
            None,
            r"clip_norm 2 .* take clip_stage_norm in its place.* such as --plan, stay",
        ),
        ({}, ComputeOptions(precision="fp16"), None, "take bf16"),
        ({}, ComputeOptions(compile="cudagraphs"), None, "records where weights are"),
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


def test_micro_batches_of_several_sizes_are_named():
    """In a plan made by hand, whose counts in flight nobody could decide."""
    chosen = plan(built("TwoBranch"), 3, batch_size=4, microbatch_size=4)
    first, *others = chosen.stage_graph.stages
    stages = (replace(first, microbatch_size=2, in_flight=0), *others)
    uneven = replace(chosen.stage_graph, stages=stages)
    with pytest.raises(InvalidPlanError, match="micro-batches of 2, 4, 4 samples"):
        asynchronous_stages(replace(chosen, mode="async", policy="stash", stage_graph=uneven))


def test_auto_knows_of_the_update_that_is_kept():
    """RMSprop has no rule, so its last update is the third copy."""
    workload = with_options(built("TwoBranch"), optimizer=torch.optim.RMSprop)
    chosen = plan(built("TwoBranch"), 3, batch_size=4, microbatch_size=4)
    policy, reason = choose("auto", chosen, 1, workload)
    assert policy.name == "pipeoptim"
    assert "the last update of RMSprop, which is kept," in reason
    assert "at most 3 copies" in reason


@pytest.mark.dist
def test_plans_that_cannot_run_without_a_flush() -> None:
    """Each with its reason and a way on."""
    model = cut("chain 3")
    chosen = plan_of(model)
    graph = chosen.stage_graph
    shared = [replace(s, devices=(0,)) if i == 2 else s for i, s in enumerate(graph.stages)]
    together = replace(chosen, stage_graph=replace(graph, stages=tuple(shared)))
    (text,) = refusals(model, (together, "stash", {}))
    assert text.startswith("InvalidPlanError: device 0 has stages 0 and 2")
    assert "devices of its own" in text
    rising = [replace(s, in_flight=k) for s, k in zip(graph.stages, (2, 3, 1), strict=True)]
    stuck = replace(chosen, stage_graph=replace(graph, stages=tuple(rising)))
    uneven = [replace(s, microbatch_size=2) if i == 1 else s for i, s in enumerate(graph.stages)]
    mixed = replace(chosen, stage_graph=replace(graph, stages=tuple(uneven)), mode="sync")
    halves = plan_of(model, microbatches=2)
    deep = replace(plan_of(model, 3, microbatches=3), mode="sync", schedule="1f1b-deep", policy="")
    cases: list[tuple[str, Plan, str, dict[str, Any]]] = [
        ("schedule is gpipe", replace(chosen, schedule="gpipe"), "stash", {}),
        ("the warm-up rises along stage edge 0 -> 1", stuck, "stash", {}),
        ("micro-batches of 4, 2, 4 samples", mixed, "stash", {}),
        ("PolicyError: stash", halves, "stash", {}),
        ("PolicyError: 2bw", halves, "2bw", {}),
        ("3 < 4; choose 4 or more micro-batches", deep, "2bw", {}),
        ("a norm, more than 0", chosen, "stash", {"clip_stage_norm": 0.0}),
        ("the plan is for 4", chosen, "stash", {}),
    ]
    texts = refusals(model, *(case[1:] for case in cases))
    for text, (expected, *_) in zip(texts, cases, strict=True):
        assert expected in text


@pytest.mark.dist
def test_tied_parameters_are_refused_unless_frozen() -> None:
    model = small.built("Tied")
    chosen = async_plan(model, 2)

    def work() -> str:
        with pytest.raises(InvalidPlanError) as caught:
            built_pipeline(model, chosen)
        return str(caught.value)

    assert "stages 0 and 1 share parameter words.weight" in on_ranks(chosen, work)[0]

    def frozen() -> float:
        model.module.get_parameter("words.weight").requires_grad_(False)
        return float(built_pipeline(model, chosen).step(small.batch(8)))

    first, second = on_ranks(chosen, frozen)
    assert first == second > 0


@pytest.mark.dist
def test_auto_follows_the_recommendation_and_says_why() -> None:
    model = cut("chain 3", "adam")

    def work() -> list[tuple[str, str]]:
        plans = [plan_of(model), plan_of(model, microbatches=4)]
        start, found = start_of(model), []
        for chosen in plans:
            fresh(model, start)
            pipe = pipeline(model, chosen, "auto")
            found.append((pipe.policy.name, pipe.reason))
            fresh(model, start)
        named = pipeline(model, plan_of(model), PredictStash(clip=4.0))
        return [*found, (repr(named.policy), named.reason)]

    (name, reason), (several, _), (mine, none) = on_ranks(plan_of(model), work)[0]
    assert name == "pipeoptim"
    assert "Adam" in reason
    assert several == "2bw"
    assert (mine, none) == ("PredictStash(ramp=0, clip=4.0)", "")


@pytest.mark.dist
def test_replicas_take_turns_as_the_plan_says() -> None:
    """Unless the run says otherwise; both ways train."""
    model = cut("chain 2")
    planned = replace(plan_of(model, replicas=(2, 1)), round_robin=True)

    def work() -> list[tuple[bool, int]]:
        start, results = start_of(model), []
        for option in (None, True, False):
            fresh(model, start)
            pipe = pipeline(model, planned, "stash", round_robin=option)
            losses = list(pipe.steps(batches(4)))
            results.append((pipe.is_round_robin, len(losses)))
        return results

    assert on_ranks(planned, work)[0] == [(True, 4), (True, 4), (False, 4)]


@pytest.mark.dist
def test_memory_is_that_of_whole_minibatches() -> None:
    """The plan's own prediction is for halves of them; memory for the wholes is asked for first."""
    model = cut("chain 2")

    def expected(samples: int) -> Plan:
        chosen = plan_of(model, samples, replicas=(2, 1))
        known = replace(chosen, predicted=Prediction(1.0, 1.0, 0.0, (1, 1, 1)))
        rounds = order_of(known, asynchronous_stages(known), in_turns=True)
        return budgeted(known, rounds, model.captured, Stash())

    peaks, twice = (expected(n).predicted.device_peak_bytes for n in (1 << 12, 1 << 13))
    assert peaks[0] == peaks[1] > peaks[2]
    # Of two mini-batches in flight: what enters the layer norm and what leaves tanh is one tensor,
    # which leaves the linear layer another; 6 numbers of 4 bytes for each of 4096 samples.
    assert twice[0] - peaks[0] > 2 * (1 << 12) * 6 * 4
    assert twice[0] < 2 * peaks[0]  # weights do not grow
    (text,) = refusals(model, (expected(1 << 40), "stash", {"round_robin": True}))
    assert text.startswith("InfeasiblePlanError")
    assert "by the plan's prediction" in text
