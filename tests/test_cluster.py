"""Clusters: presets, links through the hierarchy, shared ports, refusals."""

from __future__ import annotations

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


def test_slowest_link_of_a_set() -> None:
    """A set is as slow as its two most distant members, in whatever order they are given."""
    assert RACKS.slowest_link([2, 0, 3]).level == 0
    assert RACKS.slowest_link([5, 0, 3]).level == 1
    assert RACKS.slowest_link([23, 1]).level == 2
    assert RACKS.slowest_link([7]).level == 0


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


@given(st.data())
def test_properties_of_links(data: st.DataObject) -> None:
    """Links are symmetric, and none is better than the one to the neighbour."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    levels = tuple(
        Level(
            f"level {i}",
            size,
            bandwidth=data.draw(st.floats(1, 1e12)),
            latency_s=data.draw(st.floats(0, 1)),
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


@pytest.mark.parametrize(
    ("text", "devices", "device", "memory", "across"),
    [
        ("summit:8x4", 32, "v100", 16 * GIB, 12.5 * GB),
        ("dapple-a:2x8", 16, "v100", 16 * GIB, 3.125 * GB),
        ("dapple-b:16", 16, "v100", 16 * GIB, 3.125 * GB),
        ("dapple-c:16", 16, "v100", 16 * GIB, 1.25 * GB),
        ("dgx-h100:4x8", 32, "h100", 80 * GB, 400 * GB),
    ],
)
def test_presets(text: str, devices: int, device: str, memory: int, across: float) -> None:
    """Sizes are NODESxDEVICES; the figures are those of the papers' sections on hardware."""
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


@pytest.mark.parametrize(("a", "b"), [(0, 24), (24, 0), (-1, 0), (24, 25)])
def test_no_such_device(a: int, b: int) -> None:
    """A device beyond the cluster is named together with those that there are."""
    with pytest.raises(ValueError, match="cluster racks has the devices 0 to 23"):
        RACKS.link(a, b)
