"""What is wrong with a plan is said in one sentence each, with names and numbers."""

from dataclasses import replace

import pytest

from anabranch.cost import CostModel
from anabranch.errors import InvalidPlanError, ProfileError
from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.plans.check import check, require
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.objective import least_step_s
from tests.planner.helpers import cost_model

#   a --> b --> d      1 byte per sample each; every operator has 10 bytes of parameters
#   +---> c ----+
GRAPH = OpGraph(
    tuple(Op(name, (f"{name}.w",)) for name in "abcd"),
    (Value(0, (1, 2), 1), Value(1, (3,), 1), Value(2, (3,), 1)),
    tuple(Parameter(f"{name}.w", 10) for name in "abcd"),
)
PROFILE = Profile(
    GRAPH,
    (1, 2, 4),
    tuple(OpCost((1.0, 2.0, 4.0), (1.0, 2.0, 4.0), 5) for _ in range(4)),
    device="cpu",
    source="measured",
)


def cost(devices: int = 4, **options: int) -> CostModel:
    return cost_model(PROFILE, devices, **options)


def graph(*stages: str, edges: str = "", size: int = 2, batch_size: int = 8) -> StageGraph:
    """Stages as ``ab`` with devices in turn, edges as ``01 12``."""
    made = [Stage(tuple(names), (i,), size) for i, names in enumerate(stages)]
    pairs = sorted((int(edge[0]), int(edge[1])) for edge in edges.split())
    return StageGraph(tuple(made), tuple(pairs), batch_size)


VALID = graph("a", "b", "c", "d", edges="01 02 13 23")


def test_valid():
    """The diamond with a stage per operator."""
    assert check(VALID, cost()) == []
    require(VALID, cost())


def test_more_edges_than_data_are_allowed():
    """A sequential pipeline orders b before c, though nothing flows."""
    assert check(graph("a", "b", "c", "d", edges="01 02 12 13 23"), cost()) == []


@pytest.mark.parametrize(
    ("stages", "edges", "problem"),
    [
        (("a", "b", "d"), "01 12", "C1: 1 operator is in no stage: c"),
        (("a", "b", "bc", "d"), "01 02 13 23", "C1: operator b is in 2 stages"),
        (
            ("a", "b", "c", "dx"),
            "01 02 13 23",
            "the model has no operators x; it has a, b, c, d (anabranch profile MODEL lists all",
        ),
        (("a", "b", "c", "d"), "01 13 23", "C2: c in stage 2 reads from a in stage 0, but"),
        (("b", "a", "c", "d"), "03 12 23", "C2: b in stage 0 reads from a in stage 1, which comes"),
    ],
)
def test_names_what_is_wrong_with_the_stages(stages, edges, problem):
    """The first sentence."""
    assert check(graph(*stages, edges=edges), cost(len(stages)))[0].startswith(problem)


def test_names_the_detour_of_a_stage_that_is_not_convex():
    """From a through b and c back to d in the same stage."""
    problems = check(graph("ad", "bc", edges="01"), cost(2))
    assert problems[0] == (
        "C1: stage 0 is not convex: a path leaves it and comes back through b, c"
    )
    assert problems[1].startswith("C2: d in stage 0 reads from b in stage 1, which comes later")


def test_names_devices():
    """Twice, outside, idle."""
    stages = list(VALID.stages)
    stages[1] = replace(stages[1], devices=(0,))
    stages[3] = replace(stages[3], devices=(7,))
    assert check(replace(VALID, stages=tuple(stages)), cost()) == [
        "C3: device 0 holds the stages 0, 1",
        "C3: cluster 4 devices has the devices 0-3, not device 7",
        "C3: 2 of 4 devices hold no stage: 1, 3",
    ]


def test_plans_by_hand_share_devices():
    """Then what counts is the memory of all stages of a device together."""
    shared = replace(
        VALID, stages=tuple(replace(s, devices=(i % 2,)) for i, s in enumerate(VALID.stages))
    )
    assert check(shared, cost(2))[0] == "C3: device 0 holds the stages 0, 2"
    assert check(shared, cost(2), shared=True) == []
    (first, second) = check(shared, cost(2, memory=100), shared=True)
    assert first.startswith("device 0 needs 0.1 KiB for stages 0, 2; cluster")
    assert second.startswith("device 1 needs 0.1 KiB for stages 1, 3; cluster")


def test_plans_by_hand_leave_devices_out():
    """Whoever is there computes; a device that the cluster does not have is another thing."""
    assert check(VALID, cost(6)) == ["C3: 2 of 6 devices hold no stage: 4, 5"]
    assert check(VALID, cost(6), idle=True) == []
    (problem,) = check(VALID, cost(3), idle=True)
    assert problem == "C3: cluster 3 devices has the devices 0-2, not device 3"


def test_names_many_only_in_part():
    """Five, and how many more."""
    problems = check(graph("abcd"), cost(12))
    assert problems == ["C3: 11 of 12 devices hold no stage: 1, 2, 3, 4, 5 and 6 more"]


def test_names_replicas_without_samples():
    """Micro-batches of 2 on 3 devices; of 16 in a batch of 8; of a size never profiled."""
    stage = Stage(tuple("abcd"), (0, 1, 2), 2)
    assert check(StageGraph((stage,), (), 8), cost(3)) == [
        "stage 0 splits micro-batches of 2 samples over 3 devices, which leaves 1 of them without "
        "work"
    ]
    problems = check(graph("abcd", size=16), cost(1))
    assert problems[0] == "stage 0 has micro-batches of 16 samples, the batch only 8"
    assert problems[1] == (
        "stage 0 puts 16 samples on a device (its micro-batches, 16 samples, over 1 replicas), "
        "which the profile (measured, cpu, at 1, 2, 4 samples) does not cover: it was measured "
        "from 1 to 4 samples"
    )


def measured_at(*samples: int) -> Profile:
    """The same model, a second per sample and operator, profiled at these counts."""
    seconds = tuple(map(float, samples))
    second = OpCost(seconds, seconds, 5)
    return Profile(GRAPH, samples, (second,) * 4, device="cpu", source="measured")


@pytest.mark.parametrize(
    ("devices", "size", "batch_size", "slices"),
    [
        ((0,), 4, 10, "2 samples on a device (its last one, 2 samples, over 1 replicas)"),
        ((0, 1, 2), 8, 8, "2 samples on a device (its micro-batches, 8 samples, over 3 replicas)"),
        ((0, 1), 8, 11, "1 samples on a device (its last one, 3 samples, over 2 replicas)"),
    ],
    ids=["short", "uneven", "short and uneven"],
)
def test_names_slices_smaller_than_what_was_measured(devices, size, batch_size, slices):
    """Profiled from 3 samples on: the fullest slice is covered, the smallest one is not."""
    small = cost_model(measured_at(3, 4), len(devices))
    whole = StageGraph((Stage(tuple("abcd"), devices, size),), (), batch_size)
    problems = check(whole, small)
    assert problems[0].startswith(f"stage 0 puts {slices}, which the profile (measured")
    assert problems[0].endswith("it was measured from 3 to 4 samples")
    with pytest.raises(ProfileError):
        least_step_s(whole, ModelCosts(whole, small))


def test_a_replica_without_samples_needs_no_price():
    """Batch 9 in micro-batches of 8 over 2 replicas: the last sample is on one of them."""
    whole = StageGraph((Stage(tuple("abcd"), (0, 1), 8),), (), 9)
    assert check(whole, cost_model(measured_at(1, 4), 2)) == []


def test_memory_counts_what_is_in_flight():
    """Stage a of the diamond has height 2, so 3 micro-batches of 2 samples are in flight.

    10 bytes of weights, 10 of gradients, 10 of optimizer; 3 * 2 * 5 kept; a receives 2 bytes of
    gradients ahead; 10 of a gradient before it is added: 72 bytes.
    """
    assert check(VALID, cost(memory=72)) == []
    (problem,) = check(VALID, cost(memory=71))
    assert problem.startswith("stage 0 needs 72 B on each device, with 3 micro-batches of 2")


def test_memory_with_decided_counts():
    """In flight as decided: with 4 at the source it is 10 bytes more."""
    deep = replace(VALID, stages=(replace(VALID.stages[0], in_flight=4), *VALID.stages[1:]))
    assert check(deep, cost(memory=82)) == []
    assert len(check(deep, cost(memory=81))) == 1


def test_require_raises_everything():
    """One paragraph."""
    with pytest.raises(InvalidPlanError, match=r"not this model: C1: .*; C3: "):
        require(graph("a", "b"), cost())
