"""Action and Schedule: what every device does, in order, as printable data.

Text form, as in ``2F0``: stage 2, forward, micro-batch 0. After lowering there are also messages::

    0F0 0SF0>1@1[0:4]             stage 0 forwards micro-batch 0 and sends samples 0-3 of it to
                                  stage 1 on device 1
    1RF0<0@0[0:4] 1F0             stage 1 receives them for its micro-batch 0, then forwards it
    1SB0>0@0[0:4] 0RB0<1@1[0:4]   the gradients of the same samples, on their way back

A message is known by (stages, direction, samples, devices), so both ends know shapes and order
before the first step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from anabranch.errors import InvalidScheduleError


class Kind(StrEnum):
    """What an action does. Whoever asks for a property does not care which kinds there are."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"

    @cached_property
    def is_compute(self) -> bool:
        """Whether the device computes; otherwise it sends or receives."""
        return len(self.value) == 1

    @cached_property
    def is_send(self) -> bool:
        """Whether it hands over a message."""
        return self.value in ("SF", "SB")

    @cached_property
    def is_receive(self) -> bool:
        """Whether it takes a message."""
        return self.value in ("RF", "RB")

    @cached_property
    def is_forward(self) -> bool:
        """Whether it belongs to the forward, as compute or as message."""
        return self.value[-1] == "F"

    @cached_property
    def has_messages(self) -> bool:
        """Whether messages lead to this compute and away from it."""
        return self.value in ("F", "B", "I")

    @cached_property
    def ends_backward(self) -> bool:
        """Whether the gradients of a micro-batch are complete after it, and its memory is free."""
        return self.value in ("B", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a device does.

    Attributes:
        peer_stage: the stage at the other end of a message, -1 for compute.
        peer: the device at the other end of a message, -1 for compute.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer_stage: int = -1
    peer: int = -1
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.kind.is_compute:
            return text
        arrow = ">" if self.kind.value[0] == "S" else "<"
        return f"{text}{arrow}{self.peer_stage}@{self.peer}[{self.start}:{self.stop}]"

    @staticmethod
    def parse(text: str) -> Action:
        """Read the text form, or raise an ``InvalidScheduleError``."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise InvalidScheduleError(f"{text!r} is no action; write one as 2F0 or 0SF0>1@1[0:4]")
        stage, kind, microbatch, peer_stage, peer, start, stop = match.groups()
        if Kind(kind).is_compute != (peer is None):
            raise InvalidScheduleError(f"{text!r}: a message names its peer, compute does not")
        head = int(stage), Kind(kind), int(microbatch)
        if peer is None:
            return Action(*head)
        return Action(*head, int(peer_stage), int(peer), int(start), int(stop))


_PATTERN = re.compile(r"(\d+)(F|B|I|W|SF|RF|SB|RB)(\d+)(?:[<>](\d+)@(\d+)\[(\d+):(\d+)\])?")


@dataclass(frozen=True)
class Schedule:
    """One ordered list of actions per device.

    Attributes:
        actions: device -> what it does, in order; a device may hold several stages.
        slots: receives that may be posted ahead per channel (one direction of one stage edge
            between two devices).
    """

    actions: Mapping[int, tuple[Action, ...]]
    slots: int = 1

    @property
    def is_lowered(self) -> bool:
        """Whether sends and receives have been put in."""
        # Replicas share one list, and a message is what has a peer.
        different = {id(actions): actions for actions in self.actions.values()}
        return any(a.peer >= 0 for actions in different.values() for a in actions)

    def __str__(self) -> str:
        return "\n".join(
            f"{device}: {' '.join(map(str, actions))}"
            for device, actions in sorted(self.actions.items())
        )

    @staticmethod
    def parse(text: str, *, slots: int = 1) -> Schedule:
        """Read what ``str`` prints."""
        actions = {}
        for line in text.strip().splitlines():
            device, _, rest = line.partition(":")
            actions[int(device)] = tuple(Action.parse(word) for word in rest.split())
        return Schedule(actions, slots)
