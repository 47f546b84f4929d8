"""Calibration of the machine, or of all hosts of a torchrun job: one cluster with its figures."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from anabranch import launch
from anabranch.calibration import messages, overheads, side_by_side, sums
from anabranch.calibration.machine import OtherLoad, this_machine
from anabranch.calibration.messages import Exchange, Line
from anabranch.calibration.overheads import Overheads
from anabranch.calibration.side_by_side import Paces
from anabranch.calibration.sums import Sums
from anabranch.cluster import Calibration, Cluster, Level
from anabranch.runtime import texts
from anabranch.runtime.guards.loop_ends import await_all
from anabranch.runtime.mesh import Mesh

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Calibrated:
    """What was measured.

    Attributes:
        cluster: as many devices as there were ranks, or cores on one machine.
        links: pair of ranks -> its exchanges; of a sample where there are many.
    """

    cluster: Cluster
    links: dict[tuple[int, int], list[Exchange]]


@dataclass(frozen=True)
class Seen:
    """What one rank has to tell.

    Attributes:
        cores: of the first host, for which all figures of a host are measured.
        paces: see ``side_by_side.measure_paces``.
        links: exchanges with other ranks, by rank.
        alone: what it costs without others; of the first rank.
    """

    host: str
    cores: int
    paces: tuple[Paces, ...]
    links: dict[int, list[Exchange]]
    sums: Sums | None = None
    alone: Overheads | None = None


def calibrate(progress: Progress | None = None) -> Calibrated:
    """Measure links, messages, bookkeeping, updates, and how ranks slow each other down; the
    caller's random numbers go on as if nothing had been.

    Under torchrun between all of its ranks, and call it on all of them; elsewhere on local ranks,
    on as many as twice the cores, in some 15 s on a machine of few cores.

    Args:
        progress: called on the first rank with (windows done, windows in all).

    Returns:
        The same on every rank.
    """
    with torch.random.fork_rng(devices=[]):
        return _of_job(progress) if "RANK" in os.environ else _of_machine(progress)


def _of_machine(progress: Progress | None) -> Calibrated:
    """On local ranks."""
    load = OtherLoad()
    alone = overheads.measure_overheads()
    machine = this_machine()
    ks = side_by_side.counts(machine.cores, 2 * machine.cores)
    first, *others = launch.run(_rank, max(2, ks[-1]), ks, progress or _silent)
    seen = [replace(first, alone=alone), *others]
    name = f"local:{machine.cores}"
    return joined(seen, name, machine.cores, others=load.cores())


def _of_job(progress: Progress | None) -> Calibrated:
    """As a rank of torchrun."""
    is_first = int(os.environ["RANK"]) == 0
    alone = overheads.measure_overheads() if is_first else None
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    most = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = _rank(side_by_side.counts(cores, most), progress or _silent)
    seen = gathered(replace(mine, alone=alone))
    return joined(seen, f"calibrated on {platform.node()}", len(seen))


def gathered(mine: Seen) -> list[Seen]:
    """What all ranks have seen, by rank."""
    found = TypeAdapter(Seen)
    told = texts.gather(found.dump_json(mine).decode())
    return [found.validate_json(text) for text in told]


def _silent(done: int, total: int) -> None:
    pass


def _rank(ks: Sequence[int], progress: Progress) -> Seen:
    """One rank's measurements: side by side, then with each other rank in turn."""
    size = int(os.environ.get("WORLD_SIZE", "0")) or dist.get_world_size()
    mesh = Mesh(range(size), {sums.RANKS} if size > 1 else ())
    hosts = texts.gather(_host())
    local = sum(host == hosts[mesh.rank] for host in hosts[: mesh.rank])
    chosen = messages.pairs(hosts)
    # Hosts may differ: all of them wait as often as the first one does.
    cores, ks = json.loads(texts.gather(json.dumps((os.cpu_count() or 1, ks)))[0])
    windows = side_by_side.num_windows(ks, cores)
    total = windows + len(chosen)

    def told(done: int) -> None:
        if mesh.rank == 0:
            progress(done, total)

    paces = side_by_side.measure_paces(local, ks, cores, mesh.barrier, told)
    transport = mesh.transport()
    links: dict[int, list[Exchange]] = {}
    for tag, (a, b) in enumerate(chosen):
        mesh.barrier()
        if transport is not None and mesh.rank in (a, b):
            peer = b if mesh.rank == a else a
            links[peer] = messages.exchange(transport, peer, first=mesh.rank == a, tag=tag)
        told(windows + tag + 1)
    mesh.barrier()
    summing = sums.measure_sums(mesh) if size > 1 and mesh.rank in sums.RANKS else None
    mesh.barrier()
    if transport is not None:
        transport.flush()
        await_all(mesh, "calibration", 10.0)
        transport.close()
    return Seen(hosts[mesh.rank], cores, paces, links, summing)


def _host() -> str:
    """The host, also where several have one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def joined(seen: Sequence[Seen], name: str, devices: int, *, others: float = 0.0) -> Calibrated:
    """What all ranks have seen, as one cluster.

    Args:
        others: cores that other processes took meanwhile, where the kernel says so.
    """
    alone, cores = seen[0].alone, seen[0].cores
    assert alone is not None
    hosts = list(dict.fromkeys(one.host for one in seen))
    on_host = [one.paces for one in seen if one.host == hosts[0]]
    slowdown = side_by_side.slowdown(on_host, cores)
    links: dict[tuple[int, int], list[Exchange]] = {}
    ends: list[list[Exchange]] = []
    for rank, one in enumerate(seen):
        for peer, exchanges in one.links.items():
            ends.append(exchanges)
            if rank < peer:
                links[rank, peer] = exchanges
    near = {p: found for p, found in links.items() if seen[p[0]].host == seen[p[1]].host}
    far = {p: found for p, found in links.items() if p not in near}
    preset = Cluster.preset(f"local:{devices // len(hosts)}")
    levels = [_level("host", devices // len(hosts), near) if near else preset.levels[0]]
    if far:
        levels.append(_level("network", len(hosts), far))
    send = _line([[x.send_s for x in exchanges] for exchanges in ends])
    receive = _line([[x.receive_s for x in exchanges] for exchanges in ends])
    send_s, receive_s = _in_a_step(send, alone.send_s), _in_a_step(receive, alone.receive_s)
    message_s = send_s + receive_s + 2 * alone.value_s
    summed = [one.sums.sum for one in seen if one.sums is not None]
    shared = [one.sums.share for one in seen if one.sums is not None]
    calibration = Calibration(
        this_machine(),
        datetime.now(UTC).date().isoformat(),
        slowdown,
        send_s=send_s,
        send_byte_s=send.byte_s,
        receive_s=receive_s,
        receive_byte_s=receive.byte_s,
        microbatch_s=alone.microbatch_s,
        step_s=alone.step_s,
        sum_tensor_s=sums.per_tensor_s(summed, message_s),
        sum_byte_s=sums.per_byte_s(summed),
        memory_bandwidth=alone.memory_bandwidth,
        lost_share=max(side_by_side.lost_share(on_host), others),
        share_tensor_s=sums.per_tensor_s(shared, message_s),
        share_byte_s=sums.per_byte_s(shared),
        value_s=alone.value_s,
        leaf_s=alone.leaf_s,
    )
    cluster = Cluster(name, "cpu", preset.memory_bytes, tuple(levels), cores, calibration)
    return Calibrated(cluster, links)


def _level(name: str, size: int, links: dict[tuple[int, int], list[Exchange]]) -> Level:
    """The typical link among some pairs."""
    fitted = _line([[x.one_way_s for x in exchanges] for exchanges in links.values()])
    return Level(name, size, 1 / max(fitted.byte_s, 1e-15), fitted.fixed_s)


def _in_a_step(seconds: Line, measured_s: float) -> float:
    """The fixed seconds of a message among computes: as measured, or what it has at least."""
    return max(seconds.fixed_s, measured_s - seconds.byte_s * overheads.MESSAGE_BYTES)


def _line(seconds: Sequence[Sequence[float]]) -> Line:
    """The line through the medians by size."""
    return messages.line(messages.SIZES, [statistics.median(s) for s in zip(*seconds, strict=True)])
