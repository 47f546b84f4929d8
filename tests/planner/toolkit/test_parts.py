"""The period of a part by hand."""

from __future__ import annotations

from anabranch.cluster import Cluster, Level
from anabranch.planner.toolkit.parts import Part
from tests.planner.helpers import two_priced


def test_compute_is_the_period_where_links_are_fast():
    """4 samples on one device: 4 * (1 + 2) s."""
    fast = Cluster("fast", "cpu", 10**5, (Level("node", 4, 1e9, 0.0),))
    assert two_priced(cluster=fast).period_s(Part(0b01, 1)) == 12.0


def test_replicas_share_the_card_of_their_node():
    """Micro-batches of 8. One device sends 800 bytes at 50 per s; two of one node as much together.

    With four replicas each card has two of them, with 200 bytes each: 8 s, and compute is 6 s. The
    all-reduce of 900 bytes over both nodes is 2 * 3/4 * 900 / 50 + 2 * 3 * 1 = 33 s; two thirds of
    6 s hide behind it, half of the rest is each micro-batch's. Within a node it is
    2 * 1/2 * 900 / 100 = 9 s, 8 of them hidden.
    """
    assert two_priced(8).period_s(Part(0b01, 1)) == 24.0  # compute; 16 s of traffic
    assert two_priced(8).period_s(Part(0b01, 2)) == 16.0 + (9.0 - 8.0) / 2
    assert two_priced(8).period_s(Part(0b01, 4)) == 8.0 + (33.0 - 4.0) / 2


def test_gradients_count_in_the_other_direction():
    """b receives 100 bytes per sample and sends as many back; each direction counts alone."""
    assert two_priced(8).period_s(Part(0b10, 2)) == two_priced(8).period_s(Part(0b01, 2))


def test_everything_in_one_stage_sends_nothing():
    """The whole model on four devices: 2 samples, 12 s; 1800 bytes summed: 60 s but 8, over 2."""
    assert two_priced(8).period_s(Part(0b11, 4)) == 12.0 + (60.0 - 8.0) / 2


def test_uneven_replicas_cost_what_the_fullest_does():
    """5 samples on 2 devices: 3 on the fuller."""
    assert two_priced(5).compute_s(Part(0b01, 2)) == 9.0
