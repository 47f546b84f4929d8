"""The evaluator says what the simulator says, of whatever draft."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cluster import Calibration, Cluster, Machine
from anabranch.cost import CostModel
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Table, Value
from anabranch.planner.auto.evaluator import Evaluator
from anabranch.profile.profile import OpCost, Profile, UpdateCost
from anabranch.weights import policy_named
from tests.planner import shapes
from tests.planner.auto.random_drafts import random_draft
from tests.planner.auto.simulated import simulated_period_s, simulated_s
from tests.planner.helpers import cost_model, sharded

AMPLE = 2**60
TOWERS = shapes.towers("towers", 2, 1, layers=2, top=1)

CALIBRATION = Calibration(
    Machine("processor", 2, "2.13.0"),
    "2026-01-31",
    slowdown=(1.0, 1.3, 2.0),
    send_s=1e-4,
    send_byte_s=1e-9,
    receive_s=2e-4,
    receive_byte_s=2e-9,
    microbatch_s=3e-4,
    step_s=1e-3,
    sum_tensor_s=1e-5,
    sum_byte_s=1e-9,
    memory_bandwidth=1e10,
)


def tied_profile() -> Profile:
    """A table of embeddings that the last of four operators reads again, with a branch beside the
    two in the middle, a value without gradients and one without a batch dimension.
    """
    graph = OpGraph(
        tuple(
            Op(name, parameters)
            for name, parameters in [
                ("embed", ("table",)),
                ("one", ("one.w", "shared")),
                ("two", ("two.w", "shared")),
                ("beside", ("beside.w",)),
                ("head", ("table", "head.b")),
            ]
        ),
        (
            Value(0, (1, 3), 4000),
            Value(1, (2,), 4000),
            Value(0, (4,), 800, batched=False, grad=False),
            Value(2, (4,), 4000),
            Value(3, (4,), 100, grad=False),
        ),
        (
            Parameter("table", 30 * 2**20, table=Table(lookups=3, row_bytes=512, sparse=True)),
            Parameter("one.w", 60 * 2**20),
            Parameter("shared", 2**20),
            Parameter("two.w", 5 * 2**20),
            Parameter("beside.w", 40 * 2**20, trainable=False),
            Parameter("head.b", 64),
        ),
    )
    costs = tuple(
        OpCost((0.01 * i, 0.014 * i, 0.09 * i), (0.02 * i, 0.03 * i, 0.17 * i), 10**6 * i)
        for i in (1, 5, 4, 6, 2)
    )
    update = UpdateCost(1e-3, 1e-4, 1e-10)
    return Profile(graph, (1, 2, 16), costs, device="cpu", source="measured", update=update)


CASES = {
    "one node": (cost_model(sharded(TOWERS), 4, memory=AMPLE), 8),
    "nodes": (
        cost_model(
            sharded(TOWERS), 6, node=2, memory=AMPLE, bandwidth=1e9, card=1e8, latency_s=1e-4
        ),
        12,
    ),
    "tied": (
        replace(
            cost_model(sharded(tied_profile()), 6, node=3, memory=AMPLE, bandwidth=1e9, card=3e8),
            sparse_embeddings=True,
            batch_size=16,
            receive_slots=2,
        ),
        16,
    ),
    "shared cores": (
        CostModel(
            tied_profile(),
            replace(
                Cluster.preset("local:4"), memory_bytes=AMPLE, cores=2, calibration=CALIBRATION
            ),
        ),
        10,
    ),
    "little memory": (cost_model(tied_profile(), 4, memory=5 * 10**8), 16),
}


@pytest.fixture(scope="module")
def evaluators() -> dict[str, Evaluator]:
    return {name: Evaluator(cost, batch_size) for name, (cost, batch_size) in CASES.items()}


# The first call compiles.
@pytest.mark.timeout(1200)
@settings(max_examples=40)
@given(case=st.sampled_from(sorted(CASES)), seed=st.integers(0, 2**32))
def test_the_simulator_says_the_same(evaluators, case, seed):
    """Every draft takes as long as its step in the simulator, to rounding, whatever is different
    from stage to stage; and what cannot run there is infinitely long.
    """
    cost, batch_size = CASES[case]
    draft = random_draft(cost, batch_size, seed)
    expected = simulated_s(cost, batch_size, draft)
    assert evaluators[case].step_s(draft) == pytest.approx(expected, rel=1e-9)


def test_long_steps_are_short_ones_and_periods():
    """A thousand micro-batches of the pipeline take what the simulator says of all of them."""
    profile = replace(TOWERS, samples=(1,), costs=_first_costs(TOWERS), proportional=True)
    cost = cost_model(profile, 3, memory=AMPLE, bandwidth=1e6, latency_s=0.1)
    evaluator = Evaluator(cost, 1000)
    for seed in range(8):
        draft = random_draft(cost, 1000, seed, plain=True)
        draft = draft._replace(microbatch=np.full_like(draft.microbatch, 1 + seed % 2))
        draft = draft._replace(owner=np.arange(3, dtype=np.int32) % draft.num_stages)
        expected = simulated_s(cost, 1000, draft)
        assert evaluator.step_s(draft) == pytest.approx(expected, rel=1e-6)


def _first_costs(profile: Profile) -> tuple[OpCost, ...]:
    return tuple(
        OpCost(cost.forward_s[:1], cost.backward_s[:1], cost.kept_bytes) for cost in profile.costs
    )


POLICIES = {"naive": 1, "stash": 1, "pipeoptim": 1, "2bw": 4}
"""Micro-batches of a mini-batch under a policy."""


@settings(max_examples=20)
@given(
    case=st.sampled_from(["one node", "nodes", "shared cores"]),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 2**32),
)
def test_periods_of_streams_are_the_simulators(evaluators, case, policy, seed):
    """Without a flush a mini-batch takes what the simulator says where all repeats itself; where
    nothing comes back, both take a pace.
    """
    cost, _ = CASES[case]
    evaluator, rule = Evaluator(cost, 8), policy_named(policy)
    draft = random_draft(cost, 8, seed, plain=True)._replace(deep=False)
    size = 8 // POLICIES[policy]
    draft = draft._replace(microbatch=np.full_like(draft.microbatch, size))
    expected, is_periodic = simulated_period_s(cost, 8, draft, rule)
    near = 1e-5 if is_periodic else 0.03
    assert evaluator.period_s(draft, rule) == pytest.approx(expected, rel=near)


def test_a_limit_answers_only_what_takes_no_longer(evaluators):
    """A draft is as long with a limit that it meets, and infinitely long with one that it misses by
    however little.
    """
    cost, batch_size = CASES["nodes"]
    for seed in range(20):
        draft = random_draft(cost, batch_size, seed)
        seconds = evaluators["nodes"].step_s(draft)
        if math.isfinite(seconds):
            assert evaluators["nodes"].step_s(draft, seconds) == seconds
            assert evaluators["nodes"].step_s(draft, seconds * (1 - 1e-6)) == math.inf


def test_replicas_are_limited(evaluators):
    """One stage on four devices has four replicas; with at most two it is none."""
    cost, batch_size = CASES["one node"]
    draft = next(
        draft
        for draft in (random_draft(cost, batch_size, seed, plain=True) for seed in range(100))
        if draft.num_stages == 1 and draft.microbatch[0] >= 4
    )
    assert math.isfinite(evaluators["one node"].step_s(draft))
    assert Evaluator(cost, batch_size, max_replicas=2).step_s(draft) == math.inf


def test_the_compiler_is_loaded_by_those_who_search():
    """Importing it takes a quarter of a second, which no other command should wait for."""
    code = (
        "import sys, anabranch.planner, anabranch.solve, anabranch.planner.auto.evaluator\n"
        "print('numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
