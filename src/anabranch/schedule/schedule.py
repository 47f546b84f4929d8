"""Action and Schedule: the ordered actions of every device, as printable data.

Text form, as in ``2F0``: stage 2, forward, micro-batch 0. After lowering there are also messages::

    0F0 0SF0>1@1[0:4]             stage 0 forwards micro-batch 0 and sends samples 0-3 of it to
                                  stage 1 on device 1
    1RF0<0@0[0:4] 1F0             stage 1 receives them for its micro-batch 0, then forwards it
    1SB0>0@0[0:4] 0RB0<1@1[0:4]   the gradients of the same samples, on their way back

A message is identified by (stages, direction, samples, devices), so both ends know shapes and
order before the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from anabranch.errors import InvalidScheduleError
from anabranch.remembered import remembered

if TYPE_CHECKING:
    from anabranch.compiled import Ints


class Kind(StrEnum):
    """Kinds of actions; callers use the properties, so that new kinds need no change there."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    UPDATE = "U"

    @cached_property
    def number(self) -> int:
        return [*Kind].index(self)

    @cached_property
    def is_compute(self) -> bool:
        """True for forwards and backwards, False for messages and updates."""
        return self.value in ("F", "B", "I", "W")

    @cached_property
    def is_send(self) -> bool:
        return self.value in ("SF", "SB")

    @cached_property
    def is_receive(self) -> bool:
        return self.value in ("RF", "RB")

    @cached_property
    def is_forward(self) -> bool:
        """True for the forward and its messages."""
        return self.value[-1] == "F"

    @cached_property
    def has_messages(self) -> bool:
        """True for computes that receive or send messages: all but weight gradients."""
        return self.value in ("F", "B", "I")

    @cached_property
    def ends_backward(self) -> bool:
        """True for the compute that completes a micro-batch's gradients and frees its memory."""
        return self.value in ("B", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One compute, send, receive or update of a device.

    Attributes:
        microbatch: number of the micro-batch, or of the update.
        peer_stage: the stage at the other end of a message, -1 otherwise.
        peer: the device at the other end of a message, -1 otherwise.
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
        if self.peer < 0:
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
        if (Kind(kind).is_send or Kind(kind).is_receive) == (peer is None):
            raise InvalidScheduleError(f"{text!r}: a message names its peer, compute does not")
        head = int(stage), Kind(kind), int(microbatch)
        if peer is None:
            return Action(*head)
        return Action(*head, int(peer_stage), int(peer), int(start), int(stop))


_PATTERN = re.compile(r"(\d+)(F|B|I|W|U|SF|RF|SB|RB)(\d+)(?:[<>](\d+)@(\d+)\[(\d+):(\d+)\])?")


@lru_cache(maxsize=1 << 12)
def computes_of(stage: int, kind: Kind, count: int) -> tuple[Action, ...]:
    """Return cached actions of the first micro-batches: planning makes thousands of schedules from
    a few hundred of them.
    """
    return tuple(Action(stage, kind, i) for i in range(count))


class Order(tuple[Action, ...]):
    """The actions of a device, with cached indices of them; many schedules share one order."""

    @classmethod
    def of(cls, stages: Ints, kinds: Ints, microbatches: Ints) -> Order:
        """Return the computes with these ``columns``."""
        names, count = [*Kind], 1 + int(microbatches.max(initial=-1))
        numbers = (stages * len(names) + kinds).tolist()
        ways = {n: divmod(n, len(names)) for n in {*numbers}}
        computes = {n: computes_of(s, names[kind], count) for n, (s, kind) in ways.items()}
        order = cls([computes[n][m] for n, m in zip(numbers, microbatches.tolist(), strict=True)])
        order.columns = stages, kinds, microbatches
        return order

    @cached_property
    def is_lowered(self) -> bool:
        """True if the order has sends and receives."""
        return len(_where(self.columns[1], (k for k in Kind if k.is_send or k.is_receive))) > 0

    @cached_property
    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Stages, kinds as ``Kind.number``, and micro-batches of the actions."""
        stages = _array([action.stage for action in self])
        kinds = _array([action.kind.number for action in self])
        return stages, kinds, _array([action.microbatch for action in self])

    @cached_property
    def passes(self) -> Mapping[tuple[int, bool], Ints]:
        """(stage, is forward) -> positions of computes with messages."""
        stage, kind, _ = self.columns
        passes = _where(kind, [kind for kind in Kind if kind.has_messages])
        is_forward = kind[passes] == Kind.FORWARD.number
        parts = _alike(stage[passes], is_forward)
        return {(int(stage[passes[at[0]]]), bool(is_forward[at[0]])): passes[at] for at in parts}

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Stages with actions, ascending."""
        return tuple(sorted({stage for stage, _ in self.passes}))

    def split(self, stages: frozenset[int]) -> Order:
        """Replace backwards of these stages by gradients of inputs, then of weights."""
        return self._split(stages.intersection(self.stages))

    @remembered
    def _split(self, stages: frozenset[int]) -> Order:
        import numpy as np

        stage, kind, microbatch = self.columns
        is_split = (kind == Kind.BACKWARD.number) & np.isin(stage, [*stages])
        at = np.repeat(np.arange(len(self)), 1 + is_split)
        kind, second = kind[at], 1 + np.flatnonzero(at[1:] == at[:-1])
        kind[second - 1], kind[second] = Kind.INPUT_GRADIENT.number, Kind.WEIGHT_GRADIENT.number
        return Order.of(stage[at], kind, microbatch[at])

    @remembered
    def last_backwards(self, per_update: int = 0) -> Mapping[int, int]:
        """Map positions of the last backward before each update to stages.

        Args:
            per_update: micro-batches per update; 0 for a single update.
        """
        import numpy as np

        stage, kind, microbatch = self.columns
        ends = _where(kind, [kind for kind in Kind if kind.ends_backward])
        update = microbatch[ends] // per_update if per_update else 0 * ends
        last = np.full((1 + update.max(initial=0), 1 + stage.max(initial=0)), -1)
        last[update, stage[ends]] = ends  # of several, NumPy keeps the one that comes last
        return {at: int(stage[at]) for at in last[last >= 0].tolist()}

    @remembered
    def computes(self, per_update: int = 0) -> list[tuple[Action, bool, Ints]]:
        """Group equal computes as (first of them, whether they are last backwards, positions)."""
        import numpy as np

        stage, kind, microbatch = self.columns
        final = np.zeros(1 + stage.max(initial=0), np.int64)
        np.maximum.at(final, stage, microbatch)  # last micro-batches may have fewer samples
        is_end = np.zeros(len(self), np.bool_)
        is_end[[*self.last_backwards(per_update)]] = True
        computes = _where(kind, [kind for kind in Kind if kind.is_compute])
        rows = np.array([stage, kind, microbatch == final[stage], is_end])[:, computes]
        groups = (computes[at] for at in _alike(*rows))
        return [(self[at[0]], bool(is_end[at[0]]), at) for at in groups]


def _array(numbers: Sequence[int]) -> Ints:
    import numpy as np

    return np.array(numbers, np.int64)


def _where(kinds: Ints, some: Iterable[Kind]) -> Ints:
    """Return the positions of actions of some kinds."""
    import numpy as np

    is_wanted = np.zeros(len(Kind), np.bool_)
    is_wanted[[kind.number for kind in some]] = True
    return np.flatnonzero(is_wanted[kinds])


def _alike(*columns: Ints) -> list[Ints]:
    """Return groups of equal rows as ascending positions, in the order of their first rows."""
    import numpy as np

    keys = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        keys = keys * (1 + int(column.max(initial=0))) + column
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order], append=-1)) + 1  # np.split takes far longer
    parts = [order[start:stop] for start, stop in pairwise([0, *ends.tolist()])]
    return sorted(parts, key=lambda part: int(part[0]))


@dataclass(frozen=True)
class Schedule:
    """An ordered list of actions per device.

    Attributes:
        actions: device -> its actions, in order; a device may hold several stages.
    """

    actions: Mapping[int, tuple[Action, ...]]

    @cached_property
    def orders(self) -> Mapping[int, Order]:
        """``actions`` as orders; replicas share one object."""
        known = {id(a): a if isinstance(a, Order) else Order(a) for a in self.actions.values()}
        return {device: known[id(actions)] for device, actions in self.actions.items()}

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Stages whose backwards are split into gradients of inputs and of weights."""
        lists = self.actions.values()
        return frozenset(a.stage for row in lists for a in row if a.kind is Kind.INPUT_GRADIENT)

    @property
    def is_lowered(self) -> bool:
        """True after sends and receives have been inserted."""
        return any(order.is_lowered for order in self.orders.values())

    @property
    def computes(self) -> Schedule:
        """The schedule without sends and receives."""
        if not self.is_lowered:
            return self
        rows = {d: tuple(a for a in row if a.peer < 0) for d, row in self.actions.items()}
        return Schedule(rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{device}: {' '.join(map(str, actions))}"
            for device, actions in sorted(self.actions.items())
        )

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parse the text made by ``str``."""
        actions = {}
        for line in text.strip().splitlines():
            device, _, rest = line.partition(":")
            actions[int(device)] = tuple(Action.parse(word) for word in rest.split())
        return Schedule(actions)
