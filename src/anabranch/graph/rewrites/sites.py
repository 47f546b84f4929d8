"""Places of a program where a rewrite applies, and why it does not apply to others."""

from __future__ import annotations

from collections.abc import Collection

MOST_NAMED = 3
"""Sites of which a sentence names as many; of others it has the number."""


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
        """Return True if a site is to be rewritten if it can be."""
        return self._wanted is None or name in self._wanted

    def reasons(self) -> str:
        """Sentence on the sites that were not rewritten."""
        by_reason: dict[str, list[str]] = {}
        for site, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(site)
        texts = []
        for reason, names in by_reason.items():
            others = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
            texts.append(f"{', '.join(names[:MOST_NAMED])}{others}: {reason}")
        return "; ".join(texts) or "no operator is of that kind"
