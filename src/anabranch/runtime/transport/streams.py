"""Streams of a device in which operations wait for other ranks, one per communicator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from anabranch.device import accelerator
from anabranch.runtime.transport.base import guarded

T = TypeVar("T")


class DeviceStreams:
    """Streams of an accelerator, from torch's pool in the order of their first use."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._streams: dict[Hashable, torch.Stream] = {}

    def fence(self) -> torch.Event:
        """Mark the place behind all that the compute stream has been given so far."""
        return accelerator.mark(self._place)

    def start(self, key: Hashable, after: Any, call: Callable[[], T]) -> T:
        """Start an operation of a communicator behind a fence."""
        if key not in self._streams:
            self._streams[key] = accelerator.new_stream(self._place)
        stream = self._streams[key]
        stream.wait_event(after)
        with stream:  # NCCL's own stream waits for the one that is current
            return guarded(call)
