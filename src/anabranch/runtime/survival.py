"""Rules of a run that outlives its ranks; ``launch`` starts them, the state is in copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from anabranch.runtime.spare_copies import Moment, SpareCopies


@dataclass(frozen=True)
class Survival:
    """How a run outlives ranks that die: the others keep their processes, and all go on from the
    newest copies of the state.

    Attributes:
        begin: called with the ranks that there will be, the failure, and the moment of the copies;
            returns the arguments of the function. It plans anew where there are fewer ranks.
        replaces: whether a new rank takes the place of a dead one.
    """

    copies: SpareCopies
    begin: Callable[[int, str, Moment | None], tuple[Any, ...]]
    replaces: bool = True


_MOST_DEATHS, _MOST_FRUITLESS = 3, 6


@dataclass
class Recoveries:
    """Recoveries since there was a newer copy: a failure that comes again and again ends the run,
    and a device whose ranks alone die is left out.
    """

    step: int = -2
    count: int = 0
    deaths: Counter[int] = field(default_factory=Counter)

    def note(self, dead: Collection[int], step: int) -> set[int] | None:
        """Note the devices of dead ranks, and the step of the newest copy.

        Returns:
            Devices that are to be left out; None if the run is to end.
        """
        if step > self.step:
            self.step, self.count = step, 0
            self.deaths.clear()
        self.count += 1
        self.deaths.update(dead)
        bad = {device for device, deaths in self.deaths.items() if deaths >= _MOST_DEATHS}
        return None if self.count > _MOST_FRUITLESS else bad
