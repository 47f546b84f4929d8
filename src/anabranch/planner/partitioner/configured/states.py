"""The states of a search with schedule configurations, and the arithmetic on them.

``configured.reach`` says what they mean. Every array of samples is [..., configuration, column,
devices], a column for each of the things that may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import BudgetError
from anabranch.planner.partitioner.chains import Chain
from anabranch.planner.partitioner.configured.menu import Menu, Offers
from anabranch.planner.partitioner.configured.prices import NEVER, Ints
from anabranch.planner.partitioner.configured.shapes import Shape


@dataclass
class Choices:
    """What may follow a block; arrays have one entry per choice.

    Attributes:
        owner: the column, in the chain's own arrays, of what follows the chain.
        column: the column of the branches' arrays.
        devices: used by what follows.
        shape: how much of the branches the first stage behind the block holds.
        config: configuration of the first stage; -1 if the chain ends with the block.
        alike: the first stages are those of another block.
    """

    owner: Ints
    column: Ints
    devices: Ints
    shape: Ints
    config: Ints
    alike: Ints


@dataclass
class Passed:
    """How a block was solved.

    Attributes:
        choices: what may follow it.
        shapes: what the first stage behind may hold of the branches; at first nothing.
        heads: what a stage before may hold of them.
        branches: by first branch of a class and its end.
        groups: runs of whole branches in one stage, by first branch and end.
        behind: first stages behind that hold ends of branches.
    """

    choices: Choices
    shapes: list[Shape]
    heads: list[Shape]
    branches: dict[tuple[int, int], Solved]
    groups: dict[tuple[int, int], Offers]
    behind: Offers | None


@dataclass
class Solved:
    """A chain up to a cut.

    Attributes:
        chain: the chain.
        stop: the cut.
        after: what follows requires of a configuration: [config, column].
        required: rows are the cuts, then the shapes of the heads of its blocks.
        first: rows are the cuts; stages that are ranges (with heads).
        alike: likewise, where a block begins at the cut and its first stages are all of one
            configuration.
        offers: per cut, the stages that begin there.
        passed: per position, how a block was solved.
    """

    chain: Chain
    stop: int
    after: Ints
    required: Ints
    first: Ints
    alike: Ints
    offers: list[Offers | None]
    passed: dict[int, Passed] = field(default_factory=dict)


class Arithmetic:
    """What stages hold and require, and how devices are shared out; counts the states.

    Args:
        menu: has the configurations.
        devices: most devices.
        budget: most states that one bound may take.
        name: of the model.
    """

    def __init__(self, menu: Menu, *, devices: int, budget: int, name: str) -> None:
        self.menu = menu
        self.devices = devices
        self._budget = budget
        self._name = name
        self.spent = 0

    def hold(self, offers: Offers, required: Ints) -> Ints:
        """What each of some stages holds, whatever the devices: [offer, column, devices]."""
        self.spend(len(offers) * required.shape[-1] * required.shape[-2])
        found = required[offers.row, offers.config]
        shifted = np.full(found.shape, NEVER)
        for d in np.unique(offers.devices):
            if d <= self.devices:
                mine = offers.devices == d
                shifted[mine, :, d:] = found[mine, :, : self.devices + 1 - d]
        held = self.menu.configs.held(offers.config, shifted)
        return np.where(held <= offers.most[:, None, None], held, NEVER)

    def least(self, offers: Offers, held: Ints) -> Ints:
        """The least of the stages of every configuration."""
        result = np.full((len(self.menu.configs), *held.shape[1:]), NEVER)
        for c in np.unique(offers.config):
            result[c] = held[offers.config == c].min(axis=0)
        return result

    def require(self, first: Ints) -> Ints:
        """What first stages require of a stage before them, by its configuration."""
        configs = self.menu.configs
        result = np.full(first.shape, NEVER)
        for y in range(len(configs)):
            if (first[y] < NEVER).any():
                self.spend(first.size)
                np.minimum(result, first[y] + configs.more[:, y, None, None], out=result)
        np.minimum(result, NEVER, out=result)
        return result

    def combine(self, one: Ints, other: Ints) -> Ints:
        """The least maximum of two, sharing out the devices."""
        self.spend(one.size * (self.devices + 1) // 2)
        result = np.full(one.shape, NEVER)
        for d in range(self.devices + 1):
            if d and (one[..., d] == one[..., d - 1]).all():
                continue
            both = np.maximum(one[..., d, None], other[..., : self.devices + 1 - d])
            np.minimum(result[..., d:], both, out=result[..., d:])
        return result

    def spend(self, states: int) -> None:
        """Count states.

        Raises:
            BudgetError: if there are more than allowed.
        """
        self.spent += states
        if self.spent > self._budget:
            raise BudgetError(
                f"planning {self._name or 'the model'} with a micro-batch "
                f"size per stage takes more than {self._budget:,} states for one bound on the "
                f"period, its budget; {self.spent:,} were needed before the end was in sight: "
                "give one micro-batch size, capture coarser operators, plan without "
                "per_stage_microbatch and kfkb, or allow more states"
            )


def joined(offers: Sequence[Offers | None]) -> Offers | None:
    """Offers of several kinds as one; ``which`` counts through them."""
    some = [each for each in offers if each is not None]
    if len(some) < 2:
        return some[0] if some else None
    kinds = [np.full(len(each), i) for i, each in enumerate(some)]
    kind = np.concatenate(kinds)
    which = np.concatenate([each.which for each in some])

    def masks(index: int) -> int:
        return some[int(kind[index])].masks(int(which[index]))

    return Offers(
        np.concatenate([each.config for each in some]),
        np.concatenate([each.devices for each in some]),
        np.concatenate([each.most for each in some]),
        np.concatenate([each.row for each in some]),
        np.concatenate([each.mode for each in some]),
        masks,
        np.arange(len(kind)),
    )


def picked(offers: Offers, some: NDArray[np.bool_]) -> Offers:
    """Some of these offers."""
    return Offers(
        offers.config[some],
        offers.devices[some],
        offers.most[some],
        offers.row[some],
        offers.mode[some],
        offers.masks,
        offers.which[some],
    )
