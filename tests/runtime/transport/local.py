"""Messages between the ranks of one process, each a thread: for tests."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport.base import Receipt, Spec, listed


class Hub:
    """Where the ranks of one process, each a thread, leave their messages for each other.

    Args:
        timeout: seconds that a message may take before its peer counts as lost.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.sent: defaultdict[tuple[int, int, int], list[list[Tensor]]] = defaultdict(list)
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

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """See ``Transport``."""
        with self._hub.changed:
            self._hub.sent[self._rank, rank, tag].append([t.contiguous() for t in tensors])
            self._hub.changed.notify_all()

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        """See ``Transport``."""
        return _Awaited(self._hub, (rank, self._rank, tag), specs, device)

    def settle(self) -> None:
        """See ``Transport``; what was sent is in the hub."""

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
    def __init__(
        self, hub: Hub, key: tuple[int, int, int], specs: Sequence[Spec], device: torch.device
    ) -> None:
        self._hub, self._key, self._specs, self._device = hub, key, specs, device

    def wait(self) -> list[Tensor]:
        with self._hub.changed:
            self._hub.wait_for(lambda: bool(self._hub.sent[self._key]))
            message = self._hub.sent[self._key].pop(0)
            self._hub.changed.notify_all()
        if [(t.shape, t.dtype) for t in message] != list(self._specs):
            raise ValueError(
                f"a message of {listed((t.shape, t.dtype) for t in message)} came where "
                f"{listed(self._specs)} was expected"
            )
        # A copy, because the sender may go on to hold its tensor.
        return [tensor.to(self._device, copy=True) for tensor in message]
