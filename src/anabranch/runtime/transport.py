"""Messages between ranks, under two rules that keep every checked schedule free of deadlock.

- Receives are posted ahead of their use; only a receive is ever waited for in line.
- Sends are handed over and never waited for in line: with Gloo a send completes only after its
  receive has been posted, so waiting would turn two ranks that send to each other into a deadlock.

Messages between two ranks with one tag arrive in the order they were sent. Both ends know shapes
and element types beforehand, so nothing but the numbers travels.

Tensors are allocated when their receive is posted and freed after their last use, so memory follows
what is in flight. A pool of our own would have to know who still holds a view: autograd may keep
one as a gradient.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.runtime.failure import PeerLostError

T = TypeVar("T")


class Receipt(Protocol):
    """A receive that has been posted."""

    def wait(self) -> Tensor:
        """The message, once it is there.

        Raises:
            PeerLostError: if it cannot come any more.
        """
        ...


class Transport(Protocol):
    """Moves tensors between ranks."""

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Hand over a tensor, whose contents must not change any more."""
        ...

    def receive(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Receipt:
        """Post a receive for the next message of that rank with that tag."""
        ...

    def flush(self) -> None:
        """Wait until all that was sent has been received."""
        ...

    def close(self) -> None:
        """Break all connections; a rank that waits for this one finds out."""
        ...


class ProcessGroupTransport:
    """Messages through a Gloo process group; tensors on a GPU are staged through pinned host
    memory.

    Args:
        group: of all ranks; the transport closes it.
        timeout: seconds that a message may take before its peer counts as lost.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self._sends: queue.SimpleQueue[tuple[dist.Work, Tensor] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._broken: BaseException | None = None
        # Gloo frees a send only for who waits for it. This thread waits, so a tensor lives no
        # longer than it must.
        self._reaper = threading.Thread(target=self._reap, name="anabranch sends", daemon=True)
        self._reaper.start()

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """See ``Transport``."""
        if self._broken is not None:
            raise lost(self._broken)
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor)
        tensor = tensor.contiguous()
        if tensor.numel() == 0:
            return
        work = guarded(lambda: dist.isend(tensor, rank, group=self._group, tag=tag))
        assert work is not None
        self._sends.put((work, tensor))

    def receive(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Receipt:
        """See ``Transport``."""
        cuda = device.type == "cuda"
        buffer = torch.empty(shape, dtype=dtype, pin_memory=cuda)
        if buffer.numel() == 0:
            return _Arrived(buffer.to(device))
        work = guarded(lambda: dist.irecv(buffer, rank, group=self._group, tag=tag))
        assert work is not None
        return _Posted(work, buffer, device, self._timeout)

    def flush(self) -> None:
        """See ``Transport``."""
        done = threading.Event()
        self._sends.put(done)
        done.wait()
        if self._broken is not None:
            raise lost(self._broken)

    def close(self) -> None:
        """See ``Transport``."""
        self._sends.put(None)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _reap(self) -> None:
        while (entry := self._sends.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            try:
                if self._broken is None:
                    entry[0].wait(self._timeout)
            except RuntimeError as error:
                self._broken = error
            del entry


class _Posted:
    __slots__ = ("_buffer", "_device", "_timeout", "_work")

    def __init__(
        self, work: dist.Work, buffer: Tensor, device: torch.device, timeout: timedelta
    ) -> None:
        self._work, self._buffer, self._device, self._timeout = work, buffer, device, timeout

    def wait(self) -> Tensor:
        guarded(lambda: self._work.wait(self._timeout))
        return self._buffer.to(self._device)


class _Arrived:
    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


def guarded(call: Callable[[], T]) -> T:
    """Call into torch.distributed; what breaks there is the consequence of a failure elsewhere."""
    try:
        return call()
    except RuntimeError as error:
        raise lost(error) from error


def lost(error: BaseException) -> PeerLostError:
    """The error for a connection that broke or stayed silent for too long."""
    return PeerLostError(
        f"the connection to another rank broke: {str(error).splitlines()[0][:300]}"
    )


class Hub:
    """Where the ranks of one process, each a thread, leave their messages for each other.

    Args:
        timeout: seconds that a message may take before its peer counts as lost.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.sent: defaultdict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self.is_closed = False

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait, with the lock held, until the condition holds."""
        if not self.changed.wait_for(lambda: ready() or self.is_closed, self.timeout):
            raise PeerLostError(f"no message within {self.timeout:g} s")
        if not ready():
            raise PeerLostError("another rank of this process failed")


class LocalTransport:
    """The twin of ``ProcessGroupTransport`` inside one process, for tests: same rules, no sockets.

    As with Gloo, a message moves when its receive is posted, and one of another size is an error.

    Args:
        hub: shared by all ranks.
        rank: of this end.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """See ``Transport``."""
        with self._hub.changed:
            self._hub.sent[self._rank, rank, tag].append(tensor.contiguous())
            self._hub.changed.notify_all()

    def receive(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Receipt:
        """See ``Transport``."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        return _Awaited(self._hub, (rank, self._rank, tag), buffer)

    def flush(self) -> None:
        """See ``Transport``."""
        sent = self._hub.sent
        with self._hub.changed:
            self._hub.wait_for(
                lambda: not any(sent[key] for key in list(sent) if key[0] == self._rank)
            )

    def close(self) -> None:
        """See ``Transport``."""
        with self._hub.changed:
            self._hub.is_closed = True
            self._hub.changed.notify_all()


class _Awaited:
    def __init__(self, hub: Hub, key: tuple[int, int, int], buffer: Tensor) -> None:
        self._hub, self._key, self._buffer = hub, key, buffer

    def wait(self) -> Tensor:
        with self._hub.changed:
            self._hub.wait_for(lambda: bool(self._hub.sent[self._key]))
            message = self._hub.sent[self._key].pop(0)
            self._hub.changed.notify_all()
        if message.shape != self._buffer.shape or message.dtype != self._buffer.dtype:
            raise ValueError(
                f"a message of {message.dtype}{list(message.shape)} came where "
                f"{self._buffer.dtype}{list(self._buffer.shape)} was expected"
            )
        return self._buffer.copy_(message)
