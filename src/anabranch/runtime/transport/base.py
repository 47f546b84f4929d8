"""The protocol of transports; the package documents the rules."""

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
        """Return the tensors once they have come; raise PeerLostError if they cannot any more."""


class Transport(Protocol):
    """Moves tensors between ranks."""

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """Hand over a message of at least one tensor, whose contents must not change any more."""

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        """Post a receive for the next message of a rank and tag, whose specs both ends know."""

    def settle(self) -> None:
        """Wait, if needed, until other ranks can receive all sent messages without this host; they
        post their receives meanwhile.
        """

    def flush(self) -> None:
        """Wait until all sent messages would arrive even if this rank ended."""

    def close(self) -> None:
        """Break all connections; a rank that waits for this one finds out."""


def listed(specs: Iterable[Spec]) -> str:
    """Return element types and shapes as text."""
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in specs)


def guarded(call: Callable[[], T]) -> T:
    """Call into torch.distributed; raise PeerLostError if a connection broke, not for an error of
    this rank's own GPU.
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
    """Return the error for a connection that broke or stayed silent for too long."""
    return PeerLostError(
        f"the connection to another rank broke: {str(error).splitlines()[0][:300]}"
    )
