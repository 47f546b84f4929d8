"""Clusters: presets, links through the hierarchy, shared ports, refusals."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import GB, GIB, PRESETS, Cluster, Level, Link

# 2 racks of 3 nodes of 4 devices: device 0-11 in rack 0, device 12-23 in rack 1.
RACKS = Cluster(
    "racks",
    device="v100",
    memory_bytes=16 * GIB,
    levels=(
        Level("node", 4, bandwidth=40 * GB, latency_s=5e-6),
        Level("rack", 3, bandwidth=10 * GB, latency_s=10e-6),
        Level("hall", 2, bandwidth=20 * GB, latency_s=20e-6),
    ),
)


def test_sizes() -> None:
    """The number of devices is the product of the sizes; groups grow by level."""
    assert RACKS.num_devices == 24
    assert RACKS.group_sizes == (4, 12, 24)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0, 3, Link(40 * GB, 5e-6, level=0)),
        (3, 4, Link(10 * GB, 10e-6, level=1)),
        (0, 11, Link(10 * GB, 10e-6, level=1)),
        # Between racks the hall's wire is faster, but the rack's card is on the way too.
        (11, 12, Link(10 * GB, 20e-6, level=2)),
    ],
)
def test_link_is_the_slowest_on_the_way(a: int, b: int, expected: Link) -> None:
    """Two devices talk at the pace of the slowest level that they climb, in both directions."""
    assert RACKS.link(a, b) == RACKS.link(b, a) == expected


def ports(cluster: Cluster, a: int, b: int) -> tuple[tuple[str, int, int], ...]:
    """What a transfer occupies, in words; every number is one of the cluster's."""
    numbers = cluster.ports(a, b)
    assert max(numbers) < cluster.num_ports
    return tuple(map(cluster.port, numbers))


def test_ports() -> None:
    """A transfer occupies the devices' own links, then the card of every group that it leaves.

    Device 1 (node 0, rack 0) to device 14 (node 3, rack 1)::

        device 1 -> node 0 -> rack 0 -> rack 1 -> node 3 -> device 14
    """
    assert ports(RACKS, 1, 2) == (("out", 0, 1), ("in", 0, 2))
    assert ports(RACKS, 1, 14) == (
        ("out", 0, 1),
        ("in", 0, 14),
        ("out", 1, 0),
        ("in", 1, 3),
        ("out", 2, 0),
        ("in", 2, 1),
    )


def test_devices_of_a_node_share_its_card() -> None:
    """Two transfers out of one node meet at its card; from two nodes they do not."""
    card = ("out", 1, 0)
    assert card in ports(RACKS, 0, 4)
    assert card in ports(RACKS, 1, 8)
    assert card not in ports(RACKS, 5, 8)


NICS = Cluster(
    "nics",
    "h100",
    GIB,
    (
        Level("node", 4, bandwidth=40.0, latency_s=0.0),
        Level("rack", 2, bandwidth=10.0, latency_s=1.0, cards=2),
        Level("hall", 2, bandwidth=8.0, latency_s=2.0, cards=8),
    ),
)
"""Racks of 2 nodes of 4 devices: a card for two devices of a node, an uplink for each of a rack."""


def test_a_device_goes_through_its_own_card():
    """Devices 0 and 1 have the first card of node 0, 2 and 3 the second; node 1 has cards 2 and 3.
    Between racks a device has an uplink besides.
    """
    assert ports(NICS, 1, 6) == (("out", 0, 1), ("in", 0, 6), ("out", 1, 0), ("in", 1, 3))
    assert not set(ports(NICS, 1, 6)) & set(ports(NICS, 2, 5))
    assert ports(NICS, 3, 12)[2:] == (("out", 1, 1), ("in", 1, 6), ("out", 2, 3), ("in", 2, 12))
    assert NICS.num_ports == 2 * (16 + 8 + 16)


@pytest.mark.parametrize(
    ("devices", "bandwidth", "latency_s"),
    [
        ((0, 1, 2), 40.0, 0.0),  # in a node
        ((0, 4), 10.0, 1.0),  # one device, one card per node
        ((0, 1, 4, 5), 10.0, 1.0),  # two devices that share a card
        ((0, 2, 4, 6), 20.0, 1.0),
        ((0, 1, 2, 3, 6), 10.0, 1.0),  # all go through the only card of the second node
        (range(8), 20.0, 1.0),
        ((0, 8), 8.0, 2.0),
        (range(16), 20.0, 2.0),  # between racks there are eight uplinks, of 64 together
    ],
)
def test_a_ring_has_all_cards_of_its_devices(devices, bandwidth, latency_s):
    """As many as in the node or rack that has fewest, and their ports in both directions."""
    ring = NICS.ring(devices)
    assert (ring.bandwidth, ring.latency_s) == (bandwidth, latency_s)
    assert ring.bandwidth <= NICS.fastest_ring(len(devices), ring.level).bandwidth
    passed = {NICS.port(number) for number in NICS.ring_ports(devices)}
    others = [(a, b) for a in devices for b in devices if a != b]
    assert passed == {port for pair in others for port in ports(NICS, *pair)}


def test_replicas_spread_evenly_have_most_cards():
    """Nine replicas on nodes of 8 with a card each: 8 and 1 meet on one, 5 and 4 on four."""
    nodes = Cluster.preset("dgx-h100:2x8")
    assert nodes.ring(range(9)).bandwidth == 50 * GB
    assert nodes.fastest_ring(9, 1).bandwidth == nodes.ring((*range(4), *range(8, 13))).bandwidth
    assert nodes.ring(range(16)).bandwidth == 400 * GB


def test_devices_without_a_card_of_their_own_share():
    """Three cards of five devices: two, two and one; of more cards than devices one each."""
    levels = Level("node", 5, 1.0, 0.0), Level("network", 2, 1.0, 0.0, cards=3)
    odd = Cluster("odd", "cpu", GIB, levels)
    assert [ports(odd, d, (d + 5) % 10)[2][2] for d in range(10)] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert Cluster.preset("dgx-h100:2x3").cards == (1, 3)
    assert Cluster.preset("dgx-h100:2x3").link(0, 5).bandwidth == 50 * GB


@given(st.data())
def test_properties_of_links(data: st.DataObject) -> None:
    """Links are symmetric, and none is better than the one to the neighbour; no devices have a
    faster ring than as many spread evenly.
    """
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    levels = tuple(
        Level(
            f"level {i}",
            size,
            bandwidth=data.draw(st.floats(1, 1e12)),
            latency_s=data.draw(st.floats(0, 1)),
            cards=data.draw(st.integers(1, 9)) if i else 1,
        )
        for i, size in enumerate(sizes)
    )
    cluster = Cluster("drawn", "cpu", GIB, levels)
    device = st.integers(0, cluster.num_devices - 1)
    a, b = data.draw(device), data.draw(device)
    link = cluster.link(a, b)
    assert link == cluster.link(b, a)
    assert link.bandwidth <= levels[0].bandwidth
    assert link.latency_s >= levels[0].latency_s
    assert len(ports(cluster, a, b)) == 2 * (link.level + 1)
    # Both ends of a port are mirrored on the way back.
    back = {("in" if way == "out" else "out", level, g) for way, level, g in ports(cluster, b, a)}
    assert set(ports(cluster, a, b)) == back
    chosen = sorted(data.draw(st.sets(device, min_size=2)) if cluster.num_devices > 1 else {a})
    level = cluster.link(0, len(chosen) - 1).level
    assert cluster.ring(chosen).bandwidth <= cluster.fastest_ring(len(chosen), level).bandwidth
    assert len(cluster.ring_ports(chosen)) == len(set(cluster.ring_ports(chosen)))


@pytest.mark.parametrize(
    ("text", "devices", "device", "memory", "across"),
    [
        ("summit:8x4", 32, "v100", 16 * GIB, 12.5 * GB),
        ("dapple-a:2x8", 16, "v100", 16 * GIB, 3.125 * GB),
        ("dapple-b:16", 16, "v100", 16 * GIB, 3.125 * GB),
        ("dapple-c:16", 16, "v100", 16 * GIB, 1.25 * GB),
        ("dgx-a100:2x8", 16, "a100", 80 * GB, 25 * GB),
        ("dgx-h100:4x8", 32, "h100", 80 * GB, 50 * GB),
        ("dgx-h200:2x8", 16, "h200", 141 * GB, 50 * GB),
        ("dgx-b200:2x8", 16, "b200", 180 * GB, 50 * GB),
    ],
)
def test_presets(text: str, devices: int, device: str, memory: int, across: float) -> None:
    """Sizes are NODESxDEVICES; the figures are those of papers and data sheets."""
    cluster = Cluster.preset(text)
    assert cluster.name == text
    assert cluster.num_devices == devices
    assert (cluster.device, cluster.memory_bytes) == (device, memory)
    assert cluster.link(0, devices - 1).bandwidth == across
    assert cluster.cores == 0


def test_summit_nodes() -> None:
    """summit:2x4 is two nodes of four, not four of two."""
    cluster = Cluster.preset("summit:2x4")
    assert cluster.link(0, 3).level == 0
    assert cluster.link(3, 4).level == 1


def test_local_shares_this_machine() -> None:
    """Ranks on one machine share its memory and its cores."""
    one, four = Cluster.preset("local:1"), Cluster.preset("local:4")
    assert four.num_devices == 4
    assert four.memory_bytes == one.memory_bytes // 4
    assert four.cores == os.cpu_count()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "summit",
        "summit:",
        "summit:8",
        "summit:8x4x2",
        "summit:0x4",
        "summit:-1x4",
        "local:2x2",
        "local:1.5",
        "local:9999999",
        "nowhere:4",
        "local:4\n",
        " local:4",
    ],
)
def test_unknown_preset(text: str) -> None:
    """The message repeats what was written and lists every preset with its numbers."""
    with pytest.raises(ValueError, match="unknown cluster") as caught:
        Cluster.preset(text)
    assert repr(text) in str(caught.value)
    for name in PRESETS:
        assert f"{name}:" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "level node has size 0"),
        ({"cards": 0}, "level node has 0 cards"),
        ({"bandwidth": 0.0}, "level node has bandwidth 0.0 bytes/s"),
        ({"bandwidth": float("inf")}, "level node has bandwidth inf"),
        ({"bandwidth": float("nan")}, "level node has bandwidth nan"),
        ({"latency_s": -1e-6}, "level node has latency -1e-06 s"),
        ({"latency_s": float("nan")}, "level node has latency nan s"),
    ],
)
def test_broken_level(fields: dict[str, float], message: str) -> None:
    """A level that no machine could have is refused where it is made."""
    good: dict[str, float] = {"size": 2, "bandwidth": 1e9, "latency_s": 0.0}
    with pytest.raises(ValueError, match=message):
        Level("node", **{**good, **fields})  # type: ignore[arg-type]


def test_broken_cluster() -> None:
    """A cluster needs a level and some memory."""
    with pytest.raises(ValueError, match="cluster empty has no levels"):
        Cluster("empty", "cpu", GIB, ())
    with pytest.raises(ValueError, match="cluster tiny has 0 bytes"):
        Cluster("tiny", "cpu", 0, (Level("host", 1, 1e9, 0.0),))
    with pytest.raises(ValueError, match="level host has 8 cards, but in the innermost level"):
        Cluster("misplaced", "cpu", GIB, (Level("host", 8, 1e9, 0.0, cards=8),))


@pytest.mark.parametrize(("a", "b"), [(0, 24), (24, 0), (-1, 0), (24, 25)])
def test_no_such_device(a: int, b: int) -> None:
    """A device beyond the cluster is named together with those that there are."""
    with pytest.raises(ValueError, match="cluster racks has the devices 0 to 23"):
        RACKS.link(a, b)
