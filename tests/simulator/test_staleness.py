"""Versions and ages of weights on a chain of four and on two branches, from the papers' tables."""

import pytest

from anabranch.errors import PolicyError
from anabranch.schedule import asynchronous
from anabranch.schedule.asynchronous import split_batches
from anabranch.simulator.staleness import staleness, versions_of
from anabranch.weights import POLICIES, policy_named
from tests.simulator.helpers import chain, stage_graph

TWO_BRANCHES = ((0, 2), (1, 2))
CHAIN = chain(4)


def order_for(policy: str, edges=CHAIN, count: int = 4):
    """Mini-batches of one micro-batch, or of 4 where the policy updates after several."""
    size = 1 if policy_named(policy).microbatches else 4
    graph = stage_graph(edges, [(i,) for i in range(count)], 4, [size] * count)
    return split_batches(asynchronous.warm_up(graph))


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("naive", (1, 1, 1, 1)),
        ("stash", (4, 3, 2, 1)),  # one per mini-batch in flight: PipeDream
        ("vertical-sync", (4, 4, 4, 4)),
        ("2bw", (2, 2, 2, 2)),
        ("pipeoptim", (2, 2, 2, 1)),  # PipeOptim, Table II: 1 to 2
    ],
)
def test_versions_on_a_chain_of_four(policy, versions):
    """Table II of PipeOptim, stage by stage."""
    assert versions_of(order_for(policy), policy_named(policy)) == versions


def test_a_branch_is_less_stale_than_the_chain():
    """Two branches and a join hold two versions each, three stages in a row up to three."""
    assert versions_of(order_for("stash", TWO_BRANCHES, 3), policy_named("stash")) == (2, 2, 1)
    assert versions_of(order_for("stash", chain(3), 3), policy_named("stash")) == (3, 2, 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_differences_are_distances(policy):
    """Updates between forward and backward: the distance to the sink, or 1 for two buffers."""
    found = staleness(order_for(policy), policy_named(policy))
    expected = [1, 1, 1, 0] if policy.startswith("2bw") else [3, 2, 1, 0]
    assert [each.difference for each in found] == expected


def test_what_is_read():
    """(delay, ahead) of forward and backward at the first of four stages."""

    def first(policy: str) -> tuple[int, int, int, int]:
        each = staleness(order_for(policy), policy_named(policy))[0]
        return each.forward_delay, each.forward_ahead, each.backward_delay, each.backward_ahead

    assert first("naive") == (3, 0, 0, 0)
    assert first("stash") == (3, 0, 3, 0)
    assert first("2bw") == (1, 0, 1, 0)
    assert first("pipeoptim") == (3, 3, 0, 0)
    assert first("predict-stash") == (3, 3, 3, 3)


def test_too_few_micro_batches_are_refused():
    """Two buffers need as many as the pipeline is deep; the others take exactly one."""
    graph = stage_graph(chain(4), [(i,) for i in range(4)], 4, [2] * 4)
    two = split_batches(asynchronous.warm_up(graph))
    with pytest.raises(PolicyError, match="2 < 4"):
        staleness(two, policy_named("2bw"))
    with pytest.raises(PolicyError, match="2 micro-batches per mini-batch"):
        staleness(two, policy_named("stash"))


def test_the_last_update_is_one_more_copy():
    """Where predictions come from it, and where there is something to predict."""
    order = order_for("pipeoptim")
    assert versions_of(order, policy_named("pipeoptim"), last_update=True) == (3, 3, 3, 1)
    assert versions_of(order, policy_named("stash"), last_update=True) == (4, 3, 2, 1)
