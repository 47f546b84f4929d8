"""The mesh of ranks: a plan's devices as processes and process groups; rank i is the i-th device.

Everything a rank knows of the others it computes from the plan, so collectives run in one order
everywhere, and only numbers travel. With one device every collective is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.device import accelerator
from anabranch.errors import InvalidPlanError
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.shared_failure import SharedFailure
from anabranch.runtime.ranks import texts
from anabranch.runtime.ranks.collectives import DeviceSums, MessageCollectives, Pending
from anabranch.runtime.ranks.process_groups import (
    abort,
    blocks_of,
    choose_backend,
    connect,
    join,
    nccl_digest,
    new_group,
    require_streams,
)
from anabranch.runtime.transport import (
    Channel,
    HostTransport,
    NcclTransport,
    ProcessGroupTransport,
    Transport,
    guarded,
    meet,
)
from anabranch.runtime.transport.handshake import Handshake
from anabranch.runtime.transport.nccl import DeviceStreams, GpuWire
from anabranch.runtime.transport.notices import HostNotices

Ranks = tuple[int, ...]

_CPU = torch.device("cpu")
_ALL: Ranks = ()
"""Key of the group of all ranks for what the run itself needs. A parameter that all ranks share has
a group of its own, whose sums begin in another order.
"""

_FOREVER_S = 3e8
"""Seconds that a thread waits for a notice, which may never come."""


class Mesh:
    """The ranks of one run, seen from one of them.

    Attributes:
        failure: the first failure of the run.

    Args:
        sets: sets of ranks that reduce among themselves, the same list on every rank.
        timeout: seconds until a silent peer counts as lost.

    Raises:
        InvalidPlanError: if the number of processes is not the number of devices.
    """

    def __init__(
        self,
        devices: Sequence[int],
        sets: Collection[Ranks] = (),
        *,
        torch_device: torch.device = _CPU,
        timeout: float = 600.0,
    ) -> None:
        self.devices = tuple(devices)
        join(timeout)
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.size != len(self.devices):
            raise InvalidPlanError(
                f"the plan is for {len(self.devices)} devices, but {self.size} "
                f"process{'es run' if self.size > 1 else ' runs'} it; start one per device, with "
                f"anabranch.run or torchrun --nproc-per-node {len(self.devices)}"
            )
        self.device = self.devices[self.rank]
        self._timeout = timeout
        self.failure = SharedFailure(self.rank, self.size)
        self._near: MessageCollectives | None = None  # where all ranks share a host
        self._everyone = tuple(range(self.size))
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._made: list[dist.ProcessGroup] = []
        self._on_gpus: list[dist.ProcessGroup] = []
        self._handshake: Handshake | None = None  # where ranks have a GPU each
        self._sums: DeviceSums | None = None
        self._sets = sorted(ranks for ranks in set(sets) if len(ranks) > 1)
        if self.size > 1:
            self._groups[_ALL] = self._new_group(self._everyone, "gloo")
            self.backend = choose_backend(self.gather_bytes(nccl_digest(torch_device)))
            blocks = blocks_of(self._sets, self.size)
            for ranks in self._sets:
                self._groups[ranks] = self._new_group(ranks, self.backend, blocks=blocks)
            for group in self._on_gpus:
                connect(group, torch_device)
            if self.backend == "nccl":
                # Hosts send each other notices before they launch anything on their devices.
                self._notices = HostNotices(*self._host_connections(_FOREVER_S))
                self._handshake = handshake = Handshake(self.rank, self._notices, timeout)
                self._sums = DeviceSums(
                    lambda ranks: handshake.meeting(ranks, self._sets.index(ranks)),
                    DeviceStreams(torch_device),
                )
            self.barrier()

    @property
    def is_on_gpus(self) -> bool:
        """True if ranks have a GPU each, which wait for each other without the hosts."""
        return self._handshake is not None

    # A barrier follows whatever makes connections: a rank that fails, and leaves, as soon as its
    # own are made would disturb those who are still connecting to each other.
    def _new_group(
        self, ranks: Ranks, backend: str, *, prior: bool = False, blocks: int = 0
    ) -> dist.ProcessGroup | None:
        group = new_group(ranks, self._timeout, backend, prior=prior, blocks=blocks)
        if group is not None:
            self._made.append(group)
            if backend == "nccl":
                self._on_gpus.append(group)
        return group

    def transport(
        self, torch_device: torch.device = _CPU, channels: Collection[Channel] = ()
    ) -> Transport | None:
        """Make a transport to all other ranks for ``channels``, with connections of its own.

        On the CPU it goes through shared memory to ranks of this host, through Gloo to the rest.
        Ranks with a GPU each use NCCL; GPUs without it go through the host.
        """
        if self.size == 1:
            return None
        host, remote = self._host_connections(self._timeout)
        through_host = host or remote
        assert through_host is not None
        if remote is None and self._near is None and self._handshake is None:
            self._near = MessageCollectives(through_host, self.rank)
        self.barrier()
        if (
            not accelerator.is_on_accelerator(torch_device)
            or not channels
            or self.backend != "nccl"
        ):
            return through_host
        pairs = sorted({channel[:2] for channel in channels})
        require_streams([*pairs, *self._sets], self.size, torch_device)
        blocks, groups = blocks_of(pairs, self.size), {}
        for pair in pairs:
            group = self._new_group(pair, "nccl", prior=True, blocks=blocks)
            if group is not None:
                groups[pair] = group
        wire = GpuWire(groups, self.rank, torch_device)
        wire.connect()
        self.barrier()
        assert self._handshake is not None
        timeout, handshake = self._timeout, self._handshake
        return NcclTransport(
            self.rank, groups, wire, torch_device, timeout, handshake, through_host
        )

    def _host_connections(
        self, timeout: float
    ) -> tuple[HostTransport | None, ProcessGroupTransport | None]:
        """Return a transport to ranks of this host, and one to others, which the first uses."""
        segment, peers = meet(self.rank, self.gather_bytes)
        host = None if segment is None else HostTransport(segment, peers, self._timeout)
        # A group is made by all ranks together, also by one that does not need it.
        lacks = len(peers) < self.size - 1
        if not any(map(any, self.gather_bytes(bytes([lacks])))):
            return host, None
        remote = ProcessGroupTransport(new_group(self._everyone, timeout), timeout)
        if host is not None:
            host.otherwise = remote
        return host, remote

    def begin_sums(self) -> None:
        """Give the device the collectives that were started; see ``DeviceSums``."""
        if self._sums is not None:
            self._sums.begin()

    def gather(self, document: Any) -> list[Any]:
        """Return the documents of all ranks, as JSON; all ranks call it."""
        return texts.gather(document, self.gather_bytes)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, of one length that is not 0."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.start_all_gather(own).wait()]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks | None = None) -> Pending:
        """Start to sum over the ranks of a set (by default all), in place and in the background.
        Ranks of one set start their collectives in one order.
        """
        return self._start(ranks, tensor, MessageCollectives.all_reduce, dist.all_reduce)

    def start_reduce(self, tensor: Tensor, ranks: Ranks, target: int) -> Pending:
        """Start to sum for one rank of a set, in place; tensors of others become undefined."""
        near = partial(MessageCollectives.reduce, target=target)
        return self._start(ranks, tensor, near, partial(dist.reduce, dst=target))

    def start_all_gather(self, tensor: Tensor, ranks: Ranks | None = None) -> Pending:
        """Stack the tensors of a set, which have one shape, in the background: the result has a row
        for each rank.
        """
        chosen = self._everyone if ranks is None else ranks
        rows, own = tensor.new_empty((len(chosen), *tensor.shape)), chosen.index(self.rank)
        rows[own] = tensor

        def call(rows: Tensor, **options: Any) -> Any:
            return dist.all_gather(list(rows.unbind(0)), rows[own], **options)

        return self._start(ranks, rows, MessageCollectives.all_gather, call)

    def start_broadcast(self, tensor: Tensor, source: int, ranks: Ranks) -> Pending:
        near = partial(MessageCollectives.broadcast, source=source)
        return self._start(ranks, tensor, near, partial(dist.broadcast, src=source))

    def broadcast(self, tensor: Tensor, source: int, ranks: Ranks | None = None) -> None:
        """Copy a tensor from one rank of a set to the others, in place."""
        # For whole models, whose messages would keep shared memory for good.
        self._start(ranks, tensor, None, partial(dist.broadcast, src=source)).wait()

    def _start(
        self,
        ranks: Ranks | None,
        tensor: Tensor,
        near: Callable[..., Pending] | None,
        call: Callable[..., dist.Work | None],
    ) -> Pending:
        """Start a collective of a set of ranks, by default of all, which changes a tensor in place;
        a tensor on a device that Gloo does not know goes through the memory of the host.

        Args:
            near: the same collective by messages, if that may be faster: ``MessageCollectives``.
            call: begins it in a process group.
        """
        chosen, key = (self._everyone, _ALL) if ranks is None else (ranks, ranks)
        if len(chosen) == 1:
            return Pending(tensor)
        if self.failure.is_closed:
            raise PeerLostError("this rank has broken its connections")
        own = tensor if accelerator.has_collectives(tensor.device) else tensor.cpu()
        begin: Any = partial(call, own, group=self._groups[key], async_op=True)
        if near and self._near and MessageCollectives.are_faster(own, len(chosen)):
            # Collectives of one set start in one order, those of different sets do not.
            tag = -1 - sorted(self._groups).index(key)
            pending = near(self._near, own, ranks=chosen, tag=tag)
        elif self._sums is not None and key and accelerator.is_on_accelerator(own.device):
            pending = self._sums.add(key, own, begin)
        else:
            progress = None if self._handshake is None else self._handshake.progress
            pending = Pending(own, guarded(begin), progress=progress)
        if own is tensor:
            return pending
        return Pending(tensor, finish=lambda: tensor.copy_(pending.wait()))

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Break the connections of this rank's groups, after what they have under way."""
        if self.failure.is_closed:  # or there is one rank
            return
        self.failure.is_closed, self._near = True, None
        if self._handshake is not None:
            self._notices.close()
        for group in self._made:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()

    def abort(self) -> None:
        """Close without waiting for kernels that wait for a rank which is gone."""
        if not self.failure.is_closed:
            abort(self._on_gpus)
            self._made = [group for group in self._made if group not in self._on_gpus]
            self.close()
