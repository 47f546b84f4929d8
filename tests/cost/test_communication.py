"""Seconds of messages and all-reduces by hand."""

import numpy as np
import pytest

from anabranch.cluster import Cluster, Level
from anabranch.cost.communication import all_reduce_price, border_price, transfer_s


def test_a_message_takes_its_latency_and_its_bytes():
    """50 bytes at 100 per second after half a second; nothing for no bytes."""
    assert transfer_s(50, 0.01, 0.5) == 1.0
    assert transfer_s(0, 0.01, 0.5) == 0.0
    assert transfer_s(np.array([0, 50, 100]), 0.01, 0.5).tolist() == [0.0, 1.0, 1.5]


def test_an_all_reduce_sends_all_but_one_share_twice():
    """4 ranks: 2 * 3 quarters, so 1.5 times the bytes; 4 latencies, twice the depth of a tree."""
    link = 100.0, 0.5
    assert all_reduce_price(*link, 4) == (0.015, 2.0)
    assert all_reduce_price(*link, 4, updates=3) == (pytest.approx(0.045), 6.0)
    assert all_reduce_price(*link, 1) == (0.0, 0.0)
    assert [all_reduce_price(*link, ranks)[1] for ranks in (2, 3, 5, 1024)] == [1.0, 2.0, 3.0, 10.0]


def cluster(*levels: tuple[int, float], cards: int = 1) -> Cluster:
    found = tuple(
        Level(f"level {i}", *level, 0.0, cards if i else 1) for i, level in enumerate(levels)
    )
    return Cluster("levels", "cpu", 10**9, found)


@pytest.mark.parametrize(
    ("devices", "per_byte_s"),
    [
        (1, 1 / 50),  # the card is slower than the device's own link of 100
        (2, 2 / 50),
        (4, 4 / 50),
        (6, 4 / 50),  # on two nodes: no card has more than four
    ],
)
def test_devices_of_a_node_share_its_card(devices, per_byte_s):
    """Two nodes of four."""
    assert border_price(cluster((4, 100.0), (2, 50.0)), devices) == per_byte_s


@pytest.mark.parametrize(("cards", "sharing"), [(2, 2), (3, 2), (4, 1), (8, 1)])
def test_a_card_has_its_own_devices_only(cards, sharing):
    """Of four, the most that one of so many cards has."""
    assert border_price(cluster((4, 100.0), (2, 50.0), cards=cards), 4) == sharing / 50


def test_the_only_node_has_no_card():
    """All links are the devices' own."""
    assert border_price(cluster((4, 100.0)), 4) == 1 / 100


def test_a_rack_is_shared_by_all_of_its_nodes():
    """Two racks of two nodes of four: 8 devices share an uplink of 10."""
    racks = cluster((4, 100.0), (2, 50.0), (2, 10.0))
    assert [border_price(racks, devices) for devices in (1, 8, 12)] == [0.1, 0.8, 0.8]
