"""Places of a program where a rewrite applies, and why it does not apply to others."""

from __future__ import annotations

from collections.abc import Collection


class NotSliceableError(Exception):
    """A call whose result has no slice that slices of its arguments make."""


class Sites:
    """Sites that one rewrite meets in one program.

    Attributes:
        rewritten: names of the parameters at which the program was rewritten.
        refused: names of others -> the reason.

    Args:
        wanted: names of parameters; None for all.
    """

    def __init__(self, wanted: Collection[str] | None) -> None:
        self._wanted = wanted
        self.rewritten: list[str] = []
        self.refused: dict[str, str] = {}

    def wants(self, name: str) -> bool:
        """Whether a site is to be rewritten if it can be."""
        return self._wanted is None or name in self._wanted
