"""Clusters: identical devices in a hierarchy of levels, such as node, rack, network.

Devices are numbered so that neighbours share the innermost level::

    two cards     level 1 (network)   [    card         card     ] [    card         card     ]
    per node      level 0 (NVLink)    [ 0      1      2      3   ] [ 4      5      6      7   ]

Inside the innermost group every device has a link of its own, in each direction. From level 1 on,
groups are joined by network cards, which the devices of a group share, in each direction.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count
from operator import mul

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """Connection of two devices: bytes/s, seconds before the first byte, level in the hierarchy."""

    bandwidth: float
    latency_s: float
    level: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy: ``size`` members of the level below, and their links.

    Attributes:
        bandwidth: bytes/s of a device's link or of one card.
        cards: network cards of each member. Neighbouring devices share a card, as evenly as
            possible: of 8 devices 2 on each of 4 cards, and 3, 3 and 2 on 3 cards. With more cards
            than devices each device uses one.
    """

    name: str
    size: int
    bandwidth: float
    latency_s: float
    cards: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"level {self.name} has size {self.size}; at least 1 is needed")
        if self.cards < 1:
            raise ValueError(f"level {self.name} has {self.cards} cards; at least 1 is needed")
        if not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise ValueError(
                f"level {self.name} has bandwidth {self.bandwidth} bytes/s; "
                "it must be positive and finite"
            )
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(
                f"level {self.name} has latency {self.latency_s} s; it must not be negative"
            )


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine that a calibration holds for: processor model, its cores, the version of torch."""

    processor: str
    cores: int
    torch: str


CALIBRATION_VERSION = 5
"""Version of the measurements of a calibration, raised whenever one of its figures changes meaning.
Files without a version have the first.
"""

BUSY = 0.1
"""Share of a core that other processes may take during a calibration without a remark."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs of computing and training on a host of the cluster, as measured there.

    Seconds are of one processor core.

    Attributes:
        machine: machine on which it was measured.
        date: day of the measurement, as YYYY-MM-DD.
        slowdown: how many times as long the slowest computes while 1, 2, ... ranks of a host
            compute side by side; for more ranks the last entry, in proportion to their number.
        message_s: seconds of a message at each end; per byte it takes less than 1 % of a step.
        pass_s: seconds of a forward or backward besides its operators.
        step_s: seconds of each rank in a step besides its actions, all-reduces and update.
        all_reduce_byte_s: seconds of an all-reduce besides its messages, per byte and other rank.
        memory_bandwidth: bytes/s at which an optimizer goes through its tensors.
        lost_share: processor time that other processes took meanwhile, in cores.
        version: version of the measurements, see ``CALIBRATION_VERSION``.
    """

    machine: Machine
    date: str
    slowdown: tuple[float, ...]
    message_s: float
    pass_s: float
    step_s: float
    all_reduce_byte_s: float
    memory_bandwidth: float
    lost_share: float = 0.0
    version: int = CALIBRATION_VERSION

    def __post_init__(self) -> None:
        if not self.slowdown or self.slowdown[0] != 1 or any(s < 1 for s in self.slowdown):
            raise ValueError(
                f"slowdown {list(self.slowdown)} does not begin with 1 for one rank alone, or "
                "falls below it"
            )
        if list(self.slowdown) != sorted(self.slowdown):
            raise ValueError(f"slowdown {list(self.slowdown)} falls with more ranks")

    @property
    def remark(self) -> str:
        """A sentence if the machine was too busy for lasting figures; else empty."""
        if self.lost_share <= BUSY:
            return ""
        share = self.lost_share
        taken = f"{share:.0%} of a core" if share <= 1 else f"{share:.1f} cores"
        return (
            f"other processes took {taken} while this machine was calibrated, so predictions by "
            "it are off; calibrate again when the machine is quiet"
        )


@dataclass(frozen=True)
class Cluster:
    """Identical devices in a hierarchy.

    Attributes:
        name: name that the user gave it, such as ``summit:8x4``.
        device: kind of device, a key of ``profile.data_sheets.DATA_SHEETS`` or free text.
        memory_bytes: memory of each device.
        levels: innermost first; the product of the sizes is the number of devices.
        cores: processor cores that the devices of an innermost group share where they are
            processes on one machine; 0 where each device computes on its own.
        calibration: measured costs of such a machine; None without a measurement.
    """

    name: str
    device: str
    memory_bytes: int
    levels: tuple[Level, ...]
    cores: int = 0
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError(f"cluster {self.name} has no levels")
        if self.memory_bytes <= 0:
            raise ValueError(
                f"cluster {self.name} has {self.memory_bytes} bytes of memory per device"
            )
        if self.levels[0].cards > 1:
            raise ValueError(
                f"level {self.levels[0].name} has {self.levels[0].cards} cards, but in the "
                "innermost level every device has a link; cards stand in the level above"
            )

    @cached_property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(level.size for level in self.levels)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one group of each level, innermost first."""
        return tuple(accumulate((level.size for level in self.levels), mul))

    @cached_property
    def cards(self) -> tuple[int, ...]:
        """Cards that a member of each level uses, at most one per device."""
        sizes = (1, *self.group_sizes[:-1])
        return tuple(min(level.cards, n) for level, n in zip(self.levels, sizes, strict=True))

    @cached_property
    def shared_cores(self) -> int:
        """Cores of all hosts if there are fewer than devices; else 0."""
        cores = self.cores * (self.num_devices // self.levels[0].size)
        return cores if cores < self.num_devices else 0

    @cached_property
    def slowdown(self) -> tuple[float, ...]:
        """``Calibration.slowdown`` of a host; without a calibration 1 for as many ranks as it has
        cores; empty where each device computes on its own.
        """
        if not self.cores or self.calibration is None:
            return (1.0,) * self.cores
        return self.calibration.slowdown

    def link(self, a: int, b: int) -> Link:
        """Return the slowest link between two devices; ValueError for a device that is missing."""
        if not (0 <= a < self.num_devices and 0 <= b < self.num_devices):
            raise ValueError(
                f"no link from device {a} to device {b}: cluster {self.name} has the devices "
                f"0 to {self.num_devices - 1}"
            )
        shared = (i for i, size in enumerate(self.group_sizes) if a // size == b // size)
        return self.level_link(next(shared))

    def level_link(self, level: int) -> Link:
        """Return the slowest link on a way that climbs to this level."""
        return self._level_links[level]

    @cached_property
    def _level_links(self) -> tuple[Link, ...]:
        bandwidths = accumulate((level.bandwidth for level in self.levels), min)
        latencies = accumulate((level.latency_s for level in self.levels), max)
        return tuple(map(Link, bandwidths, latencies, count()))

    def ring(self, devices: Sequence[int]) -> Link:
        """Return the slowest link of a ring over ascending devices. As in NCCL several rings run at
        once: one per card of the group that uses fewest, so their bandwidths add up.
        """
        counts = (fewest_cards(devices, *level[:2]) for level in self._port_levels)
        return self._ring(self.link(devices[0], devices[-1]), counts)

    def fastest_ring(self, replicas: int, level: int) -> Link:
        """Return the slowest link of the fastest ring over a number of devices that meet at a
        level: with the devices spread evenly over the fewest groups that hold them.
        """
        spread = (replicas // max(2, -(-replicas // size)) for size, *_ in self._port_levels)
        counts = (min(cards, max(1, n)) for cards, n in zip(self.cards, spread, strict=True))
        return self._ring(self.level_link(level), counts)

    def _ring(self, link: Link, counts: Iterable[int]) -> Link:
        cards = zip(self.levels[: link.level + 1], counts, strict=False)
        return replace(link, bandwidth=min(level.bandwidth * count for level, count in cards))

    def ports(self, a: int, b: int) -> tuple[int, ...]:
        """Return the ports of a transfer: by level the one out of a, then the one into b."""
        occupied = list[int]()
        for size, cards, first in self._port_levels[: self.link(a, b).level + 1]:
            occupied += (first + 2 * (a * cards // size), first + 2 * (b * cards // size) + 1)
        return tuple(occupied)

    def ring_ports(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the ports that a ring over ascending devices occupies, of all their cards."""
        levels = self._port_levels[: self.link(devices[0], devices[-1]).level + 1]
        outs = (first + 2 * (d * cards // size) for size, cards, first in levels for d in devices)
        return tuple(port + into for port in dict.fromkeys(outs) for into in (0, 1))

    def port(self, number: int) -> tuple[str, int, int]:
        """Return the direction of a port ("out" or "in"), its level, and its device at level 0 or
        its card at higher levels.

        Cards are numbered over all groups: the cards of group g of level i - 1 begin at
        ``g * cards[i]``.
        """
        level = sum(first <= number for *_, first in self._port_levels) - 1
        card, into = divmod(number - self._port_levels[level][2], 2)
        return "in" if into else "out", level, card

    @cached_property
    def num_ports(self) -> int:
        """Number of ports of all levels."""
        size, cards, first = self._port_levels[-1]
        return first + 2 * cards * (self.num_devices // size)

    @cached_property
    def _port_levels(self) -> list[tuple[int, int, int]]:
        """(devices of a member, cards of a member, first port) of each level."""
        levels, first = list[tuple[int, int, int]](), 0
        for size, cards in zip((1, *self.group_sizes[:-1]), self.cards, strict=True):
            levels.append((size, cards, first))
            first += 2 * cards * (self.num_devices // size)
        return levels

    @staticmethod
    def preset(text: str) -> Cluster:
        """Return a cluster by name, such as ``local:4`` or ``summit:8x4``; ``PRESETS`` lists all.

        Raises:
            ValueError: if the name or its numbers are unknown; the message lists the presets.
        """
        match = re.fullmatch(r"([a-z0-9-]+):(\d{1,6})(?:x(\d{1,6}))?", text)
        numbers = [int(n) for n in match.groups()[1:] if n is not None] if match else []
        usage, build = PRESETS.get(match[1] if match else "", ("", None))
        if build is None or len(numbers) != usage.count("x") + 1 or 0 in numbers:
            usage = ", ".join(sorted(f"{name}:{known}" for name, (known, _) in PRESETS.items()))
            raise ValueError(
                f"unknown cluster {text!r}; write a JSON file or one of {usage}, with numbers of "
                "at least 1 for N, NODES and DEVICES"
            )
        return build(text, *numbers)


def fewest_cards(devices: Iterable[int], size: int, cards: int) -> int:
    """Return the cards that ascending devices use in the group where they use fewest.

    Args:
        size: devices of a group.
        cards: cards of a group.
    """
    if cards == 1:
        return 1
    fewest, used, before = cards, 0, -1
    for device in devices:
        card = device * cards // size
        if card != before:
            if used > 0 and card // cards != before // cards:
                fewest, used = min(fewest, used), 0
            used, before = used + 1, card
    return min(fewest, used)


def _host(name: str, devices: int) -> Cluster:
    """Return the cluster of processes on this machine.

    Shared memory, measured on two cores: 70 us for a small message, 4 to 8 GB/s for large ones,
    reading the received bytes once included.
    """
    return Cluster(
        name,
        device="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices,
        levels=(Level("host", devices, bandwidth=5.0 * GB, latency_s=80e-6),),
        cores=os.cpu_count() or 1,
    )


def _nodes(
    device: str,
    memory_bytes: int,
    node_bandwidth: float,
    network_bandwidth: float,
    network_latency_s: float,
    cards: int = 1,
) -> Callable[..., Cluster]:
    """Return a builder of clusters: nodes of equal devices, by default of one, and a network.

    Bandwidths are those between two devices of a node, and of each network card of a node.
    """

    def cluster(name: str, nodes: int, devices: int = 1) -> Cluster:
        node = Level("node", devices, node_bandwidth, latency_s=5e-6)
        network = Level("network", nodes, network_bandwidth, network_latency_s, cards)
        return Cluster(name, device, memory_bytes, levels=(node, network))

    return cluster


PRESETS: dict[str, tuple[str, Callable[..., Cluster]]] = {
    "local": ("N", _host),
    # GraphPipe, section 7: V100 with 16 GB on NVLink, 100 Gb/s InfiniBand between the nodes. NVLink
    # 2.0 between two V100 of a Summit node is 2 bricks of 25 GB/s, here at the usual 0.9 of it.
    "summit": ("NODESxDEVICES", _nodes("v100", 16 * GIB, 45 * GB, 12.5 * GB, 10e-6)),
    # DAPPLE, section 6.1: servers of 8 V100 (16 GB) on NVLink with 25 Gb/s Ethernet between them;
    # servers of one V100 with 25 or 10 Gb/s.
    "dapple-a": ("NODESxDEVICES", _nodes("v100", 16 * GIB, 45 * GB, 25 / 8 * GB, 30e-6)),
    "dapple-b": ("N", _nodes("v100", 16 * GIB, 45 * GB, 25 / 8 * GB, 30e-6)),
    "dapple-c": ("N", _nodes("v100", 16 * GIB, 45 * GB, 10 / 8 * GB, 30e-6)),
    # NVIDIA's data sheets: bandwidth of NVLink each way, 8 network cards per node, of 200 Gb/s with
    # A100 and of 400 Gb/s with the others.
    "dgx-a100": ("NODESxDEVICES", _nodes("a100", 80 * GB, 300 * GB, 25 * GB, 10e-6, cards=8)),
    "dgx-h100": ("NODESxDEVICES", _nodes("h100", 80 * GB, 450 * GB, 50 * GB, 10e-6, cards=8)),
    "dgx-h200": ("NODESxDEVICES", _nodes("h200", 141 * GB, 450 * GB, 50 * GB, 10e-6, cards=8)),
    "dgx-b200": ("NODESxDEVICES", _nodes("b200", 180 * GB, 900 * GB, 50 * GB, 10e-6, cards=8)),
}
"""Name -> the numbers that follow its colon, and a function that builds the cluster from them."""
