"""Memory of a device by hand, for one stage and for many."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.cost.footprint import Border, ParameterBytes, StageFootprint, Traffic
from anabranch.cost.memory import DeviceMemory, OptimizerBytes, StageBytes, deal, device_memory
from anabranch.graph.opgraph import Op, OpGraph
from anabranch.profile.profile import OpCost, Profile, UpdateCost

#              per sample
#  parameters   1000, of which 800 are trained, the largest gradient 300
#  kept           10
#  entering        4
#  gradients       6 come back for what leaves, and 5 bytes whatever the samples
FOOTPRINT = StageFootprint(
    ParameterBytes(1000, 800, 0, 0),
    10,
    Border(Traffic(4, 0), Traffic(6, 5), Traffic(6, 5), Traffic(4, 0)),
    300,
    passes=Traffic(0, 300),
)


PROFILE = Profile(OpGraph((Op("any"),), ()), (1,), (OpCost((1.0,), (1.0,), 0),), "cpu", "measured")


def memory(
    footprint: StageFootprint = FOOTPRINT, size: Any = 8, replicas: Any = 3, **options: Any
) -> DeviceMemory:
    """Micro-batches of 8 on 3 replicas, so 3 samples on the fullest; Adam, one receive ahead."""
    settings = ("optimizer_factor", "shard_optimizer")
    chosen = {name: options.pop(name) for name in settings if name in options}
    cost = CostModel(PROFILE, Cluster.preset("local:1"), **chosen)
    return cost.memory(footprint, size, replicas, **options)


def test_the_formula():
    """1000 + 800 * (1 version + 2 of Adam), 4 * 3 + (6 * 3 + 5) ahead; 12 + 30 per micro-batch; a
    pass of 300 bytes. While 800 bytes of gradients are summed there are two
    terms of other replicas.
    """
    assert memory() == DeviceMemory(1000 + 2400 + 12 + 23, 12 + 30, 300, 1600)
    assert memory().peak(40) == 3435 + 300 + 40 * 42
    assert memory().peak(5) == 3435 + 1600


def test_what_does_not_grow_with_the_samples_is_kept_by_every_micro_batch():
    """Casts of weights, 7 bytes: with recomputation once, in the backward."""
    footprint = replace(FOOTPRINT, kept_fixed=7)
    assert memory(footprint) == DeviceMemory(3435, 12 + 30 + 7, 300, 1600)
    assert memory(footprint, recompute=True) == DeviceMemory(3435, 12, 300 + 30 + 7, 1600)


@pytest.mark.parametrize(("replicas", "terms"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_sums_take_a_bucket_at_a_time(replicas, terms):
    """Of 25 MiB, or of one parameter if that is larger; with one replica there are none."""

    def sums(trainable, largest):
        nothing = Border(*(Traffic(0, 0),) * 4)
        footprint = StageFootprint(ParameterBytes(trainable, trainable, 0, 0), 0, nothing, largest)
        return memory(footprint, replicas=replicas).sums

    assert sums(100, 10) == terms * 100
    assert sums(2**30, 10) == terms * 25 * 2**20
    assert sums(2**30, 2**28) == terms * 2**28


def test_recomputation_keeps_one_inside():
    """Of each micro-batch only what entered; the inside of the one whose backward runs."""
    assert memory(recompute=True) == DeviceMemory(3435, 12, 30 + 300, 1600)
    assert memory(recompute=True).peak(200) == 3435 + 330 + 200 * 12


@pytest.mark.parametrize(
    ("options", "more"), [({"versions": 3}, 2 * 800), ({"optimizer_factor": 0.0}, -2 * 800)]
)
def test_options(options, more):
    """Each changes what is there whatever is in flight, and nothing else."""
    assert memory(**options) == DeviceMemory(3435 + more, 42, 300, 1600)


def test_state_of_the_optimizer_is_as_measured():
    """Here .5 of the 800 bytes, unless a factor is given."""
    profile = replace(PROFILE, update=UpdateCost(0.0, 0.0, 0.0, state=0.5))
    cost = CostModel(profile, Cluster.preset("local:1"))
    assert memory().resident - cost.memory(FOOTPRINT, 8, 3).resident == 1.5 * 800
    assert replace(cost, optimizer_factor=2.0).memory(FOOTPRINT, 8, 3) == memory()


@pytest.mark.parametrize(("replicas", "held"), [(1, 800), (2, 400), (4, 200)])
def test_shared_optimizer_state(replicas, held):
    """An equal part of the 800 trained bytes, also where one parameter has 300 of them."""
    whole = memory(replicas=replicas)
    shared = memory(replicas=replicas, shard_optimizer=True)
    assert whole.resident - shared.resident == 2 * (800 - held)


def test_terms_of_other_replicas():
    """Two of the 800 bytes of a bucket on the fullest of three, one on others, none alone."""
    assert memory().sums == 1600
    assert memory(terms=1).sums == 800
    assert memory(replicas=1).sums == 0


def test_sparse_gradients_are_the_rows_of_a_batch():
    """Instead of 500 bytes of tables each of three replicas has a third of the 60 of a batch. The
    largest is a gradient of 100 bytes. There are two terms of the 300 whole ones while these are
    summed, or all rows and what they add up to.
    """
    rows = replace(FOOTPRINT, held=ParameterBytes(1000, 800, 500, 60), largest_gradient=100)
    whole, sparse = memory(), memory(rows)
    assert whole.resident - sparse.resident == 500 - 60 / 3
    assert sparse.sums == 600
    assert memory(replace(rows, held=ParameterBytes(1000, 800, 500, 400))).sums == 2 * 400
    assert rows.held.summed == 800 - 500 + 60 / 2


def test_frozen_parameters():
    """No gradient, no optimizer state, one version."""
    nothing = Border(*(Traffic(0, 0),) * 4)
    assert memory(
        StageFootprint(ParameterBytes(70, 0, 0, 0), 0, nothing), versions=3
    ) == DeviceMemory(70, 0, 0)


def test_what_fits_into_a_device():
    """Resident 100, 20 on top in a backward, 30 per micro-batch: 3 take 210."""
    held = DeviceMemory(100, 30, 20)
    assert [held.most_in_flight(nbytes, 8) for nbytes in (149, 150, 209, 210)] == [0, 1, 2, 3]
    assert held.most_in_flight(10**6, 8) == 8
    assert held.most_in_flight(0, 8) == 0


def test_sums_have_to_fit_as_well():
    """Resident 100, and 60 on top when nothing is in flight."""
    held = DeviceMemory(100, 30, 20, 60)
    assert [held.most_in_flight(nbytes, 8) for nbytes in (159, 160)] == [0, 1]
    assert (held.peak(1), held.peak(2)) == (160, 180)


def test_micro_batches_that_take_nothing_fit_all_or_none():
    """Without anything in flight only what is there decides."""
    held = DeviceMemory(100, 0, 20)
    assert (held.most_in_flight(120, 8), held.most_in_flight(119, 8)) == (8, 0)


def test_many_stages_at_once():
    """Arrays have the numbers of the stages one by one."""
    sizes, replicas = np.array([8, 4]), np.array([3, 1])
    many = memory(FOOTPRINT, sizes, replicas, recompute=True)
    for i in range(2):
        one = memory(FOOTPRINT, sizes[i], replicas[i], recompute=True)
        assert (many.peak(2)[i], many.most_in_flight(3600, 9)[i]) == (
            one.peak(2),
            one.most_in_flight(3600, 9),
        )


def test_replicas_get_as_many_bytes_and_as_many_small_parameters() -> None:
    """Largest first to the replica with fewest bytes, 600 and 400 against 500 and 500; the others,
    5 of 2,005 bytes, in turns.
    """
    nbytes = [1, 500, 1, 400, 600, 1, 1, 500, 1]
    replicas = [0, 1, 1, 0, 0, 0, 1, 1, 0]
    assert deal(nbytes, 2) == [[part] for part in zip(replicas, nbytes, strict=True)]


def test_what_exceeds_an_equal_part_is_cut() -> None:
    """Equal parts of 90 + 20 + 10 bytes are 40: two of 90 bytes, and 10 beside the others. A tenth
    above is left as it is; so is everything where an optimizer needs whole parameters.
    """
    assert deal([20, 90, 10], 3) == [[(2, 20)], [(0, 40), (1, 40), (2, 10)], [(2, 10)]]
    assert deal([44, 36, 40], 3) == [[(0, 44)], [(2, 36)], [(1, 40)]]
    assert deal([20, 90, 10], 3, cut=False) == [[(1, 20)], [(0, 90)], [(2, 10)]]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.integers(1, 9), st.booleans())
def test_everything_is_dealt_out_once(nbytes: list[int], replicas: int, cut: bool) -> None:
    """To each replica one part of a parameter; no replica has much more than an equal part, but for
    whole parameters.
    """
    dealt = deal(nbytes, replicas, cut=cut)
    assert [sum(size for _, size in parts) for parts in dealt] == nbytes
    held = [0] * replicas
    for parts in dealt:
        assert len({replica for replica, _ in parts}) == len(parts)
        assert cut or len(parts) == 1
        for replica, size in parts:
            held[replica] += size
    assert max(held) <= 1.12 * -(-sum(nbytes) // replicas) or not cut


def test_an_update_with_temporaries_counts_where_it_takes_more_than_a_backward():
    """Ten bytes of parameters, the largest of six: 30 with gradients and one state, and then the
    temporaries; a micro-batch in flight is less.
    """
    stage = StageBytes(10.0, 10.0, 0.0, 0.0, 10.0, 6.0, 0.0, 0.0, kept=3.0, passing=0.0)

    def memory(**temporary: float) -> DeviceMemory:
        optimizer = OptimizerBytes(1.0, 0.0, 0.0)._replace(**temporary)
        return device_memory(stage, optimizer, recompute=0, replicas=1, terms=0, versions=1)

    assert memory().peak(1) == 33
    assert memory(all_temporary=1.0).peak(1) == 40
    assert memory(largest_temporary=2.0).peak(1) == 42
    assert memory(largest_temporary=2.0).peak(9) == 57
