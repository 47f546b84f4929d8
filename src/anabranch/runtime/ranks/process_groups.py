"""Process groups of a run: the backend that sums on GPUs, and the groups' first use and end.

NCCL serves ranks with a GPU each. Two of its groups that begin to connect in different orders on
two ranks wait for each other for ever, and so does a rank that destroys a group whose kernels wait
for a rank that is gone. So groups connect at the start, in one order, and are aborted after a
failure.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from anabranch.device import accelerator
from anabranch.device.host import host
from anabranch.device.kinds import kind_of
from anabranch.errors import InvalidPlanError, warn
from anabranch.runtime.guards.position import POSITION
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.ranks.attempts import begin_attempt
from anabranch.runtime.transport.base import guarded

_TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"


def device_digest(device: torch.device) -> bytes:
    """Return a digest of the memory that a device of this host has, of one length on all ranks:
    that of the GPU itself, or that of the host.
    """
    return hashlib.sha256(f"{host()} {accelerator.identity(device)}".encode()).digest()


def nccl_digest(device: torch.device) -> bytes:
    """Return ``device_digest`` of a GPU that NCCL can serve; zeros for other devices."""
    digest = device_digest(device)
    return digest if accelerator.backend(device) == "nccl" else bytes(len(digest))


def choose_backend(digests: Sequence[bytes]) -> str:
    """Return ``nccl`` if every rank has a GPU of its own, and NCCL; otherwise ``gloo``.

    Args:
        digests: ``nccl_digest`` of all ranks.
    """
    return "nccl" if all(map(any, digests)) and len(set(digests)) == len(digests) else "gloo"


LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface that nobody but this host can reach."""


def join(timeout: float = 1800.0) -> None:
    """Join the other processes of torchrun, if there are any and nobody has yet.

    Ranks that are all on one host listen to that host alone. The store, which torchrun itself has
    made, listens to everybody, of which a warning tells.
    """
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        port = int(os.environ.get("MASTER_PORT", "0"))
        if os.environ["RANK"] == "0" and listens_to_all(port):
            warn(
                f"the store of torchrun listens on port {port} of all network interfaces, though "
                "all ranks are on this host, and whoever reaches it can disturb the run or change "
                "what ranks read from it; close that port to others, or start local ranks without "
                "torchrun, which listen to this host alone"
            )
    limit = timedelta(seconds=timeout)
    with POSITION.waiting():
        shared, rank, size = next(rendezvous("env://", timeout=limit))
        store, restarts = begin_attempt(shared, rank, size, timeout)
        # All ranks have the same count now; those of torchrun's agents may differ.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def listens_to_all(port: int, tables: Collection[str] = _TCP_TABLES) -> bool:
    """Return True if a process of this host listens on a port of all interfaces (Linux).

    Args:
        tables: files in the format of ``/proc/net/tcp``.
    """
    for table in map(Path, tables):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            address, _, number = local.rpartition(":")
            if state == _LISTENS and int(number, 16) == port and not address.strip("0"):
                return True
    return False


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of the communicators that a GPU can have.

    Attributes:
        streams: queues that the driver can have, and streams in PyTorch's pool of one priority.
        other_streams: streams that do not wait for other ranks: for computation and for copies.
        blocks: blocks (and so multiprocessors) that the waiting kernels of all communicators of one
            sort, pairs or sets, may take, of 40 and more that a GPU has.
        blocks_of_one: blocks of one communicator, which fill a link of 50 GB/s and more.
        block_bytes: buffer that NCCL has for each block of a receiver (NCCL_BUFFSIZE).
    """

    streams: int = 32
    other_streams: int = 4
    blocks: int = 16
    blocks_of_one: int = 8
    block_bytes: int = 4 << 20


LIMITS = GpuLimits()


def _busiest(groups: Collection[tuple[int, ...]], size: int) -> tuple[int, int]:
    """Return the rank that is in most groups, and the number of its groups."""
    counts = Counter(rank for ranks in groups for rank in ranks)
    return max(((rank, counts[rank]) for rank in range(size)), key=lambda item: item[1])


def connection_bytes(pairs: Collection[tuple[int, ...]], size: int, rank: int) -> int:
    """Return the bytes that NCCL takes on a rank for communicators of pairs."""
    return sum(rank in pair for pair in pairs) * blocks_of(pairs, size) * LIMITS.block_bytes


def blocks_of(groups: Collection[tuple[int, ...]], size: int) -> int:
    """Return the most blocks of the kernels of each of some groups, the same on all ranks."""
    most = _busiest(groups, size)[1]
    return max(1, min(LIMITS.blocks_of_one, LIMITS.blocks // most)) if most else 0


def require_streams(
    groups: Collection[tuple[int, ...]],
    size: int,
    device: torch.device,
    settings: Mapping[str, str] = os.environ,
) -> None:
    """Accept groups for which every rank has streams and queues of the driver.

    Raises:
        InvalidPlanError: naming the busiest rank, and what to set.
    """
    rank, most = _busiest(groups, size)
    needed = 2 * most + LIMITS.other_streams  # one of ours and one of NCCL's
    who = (
        f"rank {rank} has {most} connections to other ranks (one per rank and direction that "
        f"messages have, and one per set of ranks that share a parameter), which need {needed} "
        "streams of its GPU"
    )
    if needed > LIMITS.streams:
        raise InvalidPlanError(
            f"{who}, and there are {LIMITS.streams}; plan with fewer stages or fewer replicas"
        )
    name = kind_of(device.type).queues
    queues = int(settings.get(name, "8"))
    if name and needed > queues:
        raise InvalidPlanError(
            f"{who}, but {name} is {queues}, so that a message that waits might stand before the "
            f"computation that its sender waits for; set {name}={LIMITS.streams} in the "
            "environment, before the process uses its GPU"
        )


def new_group(
    ranks: Sequence[int],
    timeout: float,
    backend: str = "gloo",
    *,
    prior: bool = False,
    blocks: int = 0,
) -> dist.ProcessGroup | None:
    """Make a group of some ranks, all ranks of the run together; return None outside the group.

    Args:
        prior: whether NCCL's kernels run on a stream of high priority.
        blocks: most blocks of NCCL's kernels.
    """
    options: Any = None
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=prior)
        if blocks:
            options.config.max_ctas = blocks
    with POSITION.waiting():
        group = guarded(
            lambda: dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout), backend=backend, pg_options=options
            )
        )
    return group if isinstance(group, dist.ProcessGroup) else None


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Use a group once, and wait for it."""
    element = torch.zeros(1, device=device)
    with POSITION.waiting():
        guarded(lambda: dist.all_reduce(element, group=group))
        element.item()


def run_store() -> Store:
    """Return the store through which the ranks of the run have met."""
    store: Store = distributed_c10d._get_default_store()
    return store


def abort(groups: Collection[dist.ProcessGroup]) -> None:
    """End NCCL's groups at once, all together: one may wait for the kernels of another.

    Each takes up to its timeout where a peer is gone, so a thread ends them, for which nobody waits
    longer than ``TIMEOUTS.abort_s``: the error that this rank ends with must reach the user.
    """
    if groups and dist.is_initialized():
        ends = threading.Thread(target=_abort, args=(groups,), name="anabranch abort", daemon=True)
        ends.start()
        ends.join(TIMEOUTS.abort_s)


def _abort(groups: Collection[dist.ProcessGroup]) -> None:
    backend: Any = next(iter(groups))._get_backend(accelerator.default_gpu())
    backend._group_start()
    try:
        for group in groups:
            # Another failure must not hide the first, nor keep other groups alive.
            with suppress(RuntimeError, ValueError):
                distributed_c10d._abort_process_group(group)
    finally:
        backend._group_end()
