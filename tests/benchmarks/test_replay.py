"""Asynchronous training in one process against loops that apply the definitions."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim import SGD

from anabranch import capture
from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.schedule.asynchronous import units_in_flight
from anabranch.weights import POLICIES, PredictStash, versions_held
from anabranch.workload import Workload
from benchmarks.replay import Replay
from tests.runtime.asynchronous import reference
from tests.runtime.asynchronous.models import OPTIMIZERS, Cut, Shared, batches, cut, halving, suited

POLICY_NAMES = sorted(POLICIES)


def replay_of(model: Cut, policy: str, **options: object) -> Replay:
    return Replay(
        model.workload,
        model.operators,
        POLICIES[policy](),
        batch_size=4,
        microbatches=4 if POLICIES[policy]().microbatches else 1,
        captured=model.captured,
        **options,
    )


def require_equal(model: Cut, policy: str, dtype: torch.dtype = torch.float32) -> Replay:
    """Train with two fills, the second one in mid-run; every bit of losses and weights. Between
    runs the module is the newest version, and no gradient is left behind.
    """
    data = batches(14, dtype=dtype)
    replay = replay_of(model, policy)
    losses = [*replay.train(data[:6]), *replay.train(data[6:])]
    expected = reference.train(
        model.by_hand, policy, data, fills=(0, 6), microbatches=replay._microbatches
    )
    assert losses == expected
    assert model.same()
    assert all(p.grad is None for p in model.workload.module.parameters())
    assert replay.updates == 14
    return replay


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_on_branches(policy):
    """Filled twice, drained twice, as by definition; and no more copies of the weights than the
    policy needs.
    """
    model = cut("two branches", suited(policy), dtype=torch.float64)
    replay = require_equal(model, policy, torch.float64)
    graph = replay.graph
    units = [units_in_flight(st.in_flight, replay._microbatches) for st in graph.stages]
    assert [weights.peak_versions for weights in replay.weights] == [
        versions_held(
            POLICIES[policy](),
            in_flight=stage.in_flight,
            deepest=max(units),
            microbatches=replay._microbatches,
        )
        for s, stage in enumerate(graph.stages)
    ]


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        *itertools.product(["predict-stash"], sorted({*OPTIMIZERS} - {"momentum"})),
        *itertools.product(["pipeoptim"], ["adam", "rmsprop"]),
        *itertools.product(["2bw", "2bw-ef"], ["adam", "muon"]),
        *itertools.product(["spectrain"], ["dampening", "nesterov", "adam"]),
    ],
)
def test_every_policy_with_every_optimizer(policy, optimizer):
    """Those that keep versions alone never look at the optimizer, and those of two buffers ask no
    more of it than the update; PipeOptim predicts as predict-stash does. SpecTrain is for SGD with
    momentum; it refuses the others.
    """
    model = cut("two branches", optimizer)
    if policy == "spectrain" and optimizer not in ("dampening", "nesterov"):
        with pytest.raises(PolicyError, match="momentum of SGD"):
            replay_of(model, policy)
        return
    require_equal(model, policy)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("spectrain", "momentum"),
        ("basis-rotation", "adamw"),
        ("pipeoptim", "adam"),
        ("predict-stash", "nadam"),
        ("2bw-ef", "adam"),
    ],
)
def test_a_schedule_of_the_rate(policy, optimizer):
    """A prediction uses the rate of the update to come; each stage's schedule goes by its own
    updates. ``test_stream`` has every policy with a schedule.
    """
    require_equal(cut("chain 3", optimizer, scheduler=halving), policy)


@pytest.mark.parametrize("policy", ["stash", "pipeoptim"])
def test_frozen_parameters_have_one_version(policy):
    """In a stage that also trains, and where a whole stage is frozen."""
    frozen = ["parts.0.0.weight", "parts.0.0.bias", "parts.0.2.weight", "parts.0.2.bias"]
    model = cut("chain 3", suited(policy), frozen=[*frozen, "parts.1.2.weight"])
    before = model.workload.module.get_parameter("parts.1.2.weight").data_ptr()
    replay = require_equal(model, policy)
    assert model.workload.module.get_parameter("parts.1.2.weight").data_ptr() == before
    assert replay.weights[0].peak_bytes == 0


@pytest.mark.parametrize("policy", ["stash", "predict-stash"])
def test_statistics_are_never_versioned(policy):
    """Every forward adds to the one set of running means, whatever weights it reads."""
    require_equal(cut("statistics"), policy)


def test_policies_differ():
    """What is compared above would notice another policy: no two of them give the same losses."""
    found = {}
    for policy in POLICY_NAMES:
        found[policy] = tuple(replay_of(cut("chain 4", suited(policy)), policy).train(batches(10)))
    assert len(set(found.values())) == len(POLICIES)


@pytest.mark.parametrize(
    "policy", ["stash", "pipeoptim", "2bw", "spectrain", "2bw-ef", "basis-rotation"]
)
def test_one_in_flight_is_synchronous(policy):
    """Drained after every mini-batch nothing is stale, so every policy that predicts by lag alone
    is plain training; SpecTrain looks ahead all the same, error feedback makes up for the update
    before, and a rotation is another step.
    """
    model = cut("chain 3", suited(policy))
    replay = replay_of(model, policy)
    data = batches(6)
    losses = [loss for batch in data for loss in replay.train([batch])]
    plain = cut("chain 3")
    optimizer = OPTIMIZERS[suited(policy)](plain.workload.module.parameters())
    expected = []
    for batch in data:
        loss = plain.workload.module(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    if policy in ("spectrain", "2bw-ef", "basis-rotation"):
        assert losses != expected
    else:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_loop_that_is_left_early_drains():
    """Mini-batches on their way are learned when the iterator is closed, then training goes on as
    after any drain.
    """
    model = cut("chain 3")
    replay = replay_of(model, "stash")
    stream = replay.train(itertools.cycle(batches(4)))
    first = [next(stream), next(stream)]
    stream.close()
    learned = replay.updates
    assert 2 < learned < 7
    second = list(replay.train(batches(3)))
    data = [*itertools.islice(itertools.cycle(batches(4)), learned), *batches(3)]
    expected = reference.train(model.by_hand, "stash", data, fills=(0, learned))
    assert [*first, *second] == [*expected[:2], *expected[learned:]]
    assert model.same()


def test_a_short_last_batch():
    """Its mean is over fewer samples; its update counts as any."""
    model = cut("chain 3")
    data = [*batches(3), {name: leaf[:2] for name, leaf in batches(1)[0].items()}, *batches(2)]
    losses = list(replay_of(model, "pipeoptim").train(data))
    assert losses == reference.train(model.by_hand, "pipeoptim", data)
    with pytest.raises(ValueError, match="2 samples is no whole number of 4 micro-batches"):
        list(replay_of(cut("chain 3"), "2bw").train(data))


def test_under_autocast_products_read_what_the_forward_read():
    """Autocast's copies of the weights serve the backward, so that without other parameters than
    those of products a backward on current weights is one on the forward's.
    """
    half = ComputeOptions(precision="bf16")
    norms = [f"parts.{i}.2.{name}" for i in (0, 1) for name in ("weight", "bias")]
    losses = {}
    for policy in ("naive", "stash"):
        for options in (half, ComputeOptions(precision="fp32")):
            model = cut("chain 3", frozen=norms)
            replay = replay_of(model, policy, options=options)
            losses[policy, options.precision] = list(replay.train(batches(8)))
    assert losses["naive", "bf16"] == losses["stash", "bf16"]
    assert losses["naive", "fp32"] != losses["stash", "fp32"]


def test_the_ramp_is_a_slower_rate():
    """With a ramp that lasts far beyond the run, a stage of lag d learns at nearly lr / d."""
    model = cut("chain 3")
    replay = Replay(
        model.workload,
        model.operators,
        PredictStash(ramp=10**9),
        batch_size=4,
        captured=model.captured,
    )
    losses = list(replay.train(batches(8)))
    for stage, rate in zip(model.by_hand, (0.05, 0.1, 0.1), strict=True):
        stage.optimizer = SGD(stage.weights, lr=rate, momentum=0.9)
    expected = reference.train(model.by_hand, "predict-stash", batches(8))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_stages_that_share_a_parameter_are_refused():
    """Each would have versions of its own; the message names parameter and stages."""
    module, example = Shared(), batches(1)[0]
    operators = [op.name for op in capture(module, example).graph.ops]
    with pytest.raises(InvalidPlanError, match=r"stages 0 and 1 share parameter first.weight"):
        Replay(
            Workload(module, example),
            [operators[:1], operators[1:]],
            POLICIES["stash"](),
            batch_size=4,
        )


def test_bad_arguments():
    """Each with what is wrong and a way on."""
    model = cut("chain 3")
    make = partial(Replay, captured=model.captured, policy=POLICIES["stash"](), batch_size=4)
    with pytest.raises(PolicyError, match=r"clip_norm 1\.0 needs the gradients of all stages"):
        make(replace(model.workload, clip_norm=1.0), model.operators)
    with pytest.raises(InvalidPlanError, match="scores is not once in the stages"):
        make(model.workload, model.operators[:2])
    with pytest.raises(ValueError, match="fp16 needs a loss scale"):
        make(model.workload, model.operators, options=ComputeOptions(precision="fp16"))
    with pytest.raises(ValueError, match="4 samples is no whole number of 3 micro-batches"):
        make(model.workload, model.operators, microbatches=3)
    with pytest.raises(PolicyError, match="2 < 3; choose 3 or more"):
        make(model.workload, model.operators, policy=POLICIES["2bw"](), microbatches=2)
