"""The protocol of transports; the package says the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anabranch.device.kinds import OWN_ERRORS
from anabranch.runtime.guards.failure import PeerLostError

T = TypeVar("T")

Spec = tuple[torch.Size, torch.dtype]
"""Shape and element type of one tensor of a message."""


class Channel(NamedTuple):
    """Messages that arrive in the order in which they were sent."""

    sender: int
    receiver: int
    tag: int


class Receipt(Protocol):
    """A receive that has been posted."""

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there; raises PeerLostError if they cannot come any more."""


class Transport(Protocol):
    """Moves tensors between ranks."""

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """Hand over a message of at least one tensor, whose contents must not change any more."""

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        """Post a receive for the next message of a rank and tag, whose specs both ends know."""

    def settle(self) -> None:
        """Wait, if anything has to, until other ranks can take what was sent without this host;
        they post their receives meanwhile.
        """

    def flush(self) -> None:
        """Wait until what was sent arrives even if this rank ends."""

    def close(self) -> None:
        """Break all connections; a rank that waits for this one finds out."""


def listed(specs: Iterable[Spec]) -> str:
    """Element types and shapes, for a message."""
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in specs)


def guarded(call: Callable[[], T]) -> T:
    """Call into torch.distributed; raises PeerLostError where a connection broke, which an error of
    this rank's own GPU is not.
    """
    try:
        return call()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in OWN_ERRORS):
            raise
        raise lost(error) from error


def lost(error: BaseException) -> PeerLostError:
    """The error for a connection that broke or stayed silent for too long."""
    return PeerLostError(
        f"the connection to another rank broke: {str(error).splitlines()[0][:300]}"
    )
