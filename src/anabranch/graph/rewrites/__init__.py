"""Rewrites of captured programs into programs with more branches and the same results.

A rewrite is a function from a program to a program, before it is measured, so that profile,
planners, simulator and runtime know nothing of it. Parameters that it cuts stay the model's:
``slices`` tells how slices are named.

A site is the parameter whose product or look-up is rewritten. Every program of a model is rewritten
at the same sites: for any number of samples, in training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from anabranch.errors import CaptureError, some
from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.rewrites.calls import Sites
from anabranch.graph.rewrites.products import join_split, products, tensor_split
from anabranch.graph.rewrites.sliced_values import concatenated_widths
from anabranch.graph.rewrites.table_split import table_columns, table_rows
from anabranch.graph.slices import whole_name

PARTS = 2
"""Parts that a rewrite makes where it is not told how many."""

REWRITES: Mapping[str, Callable[[FlatProgram, Sites, int], None]] = {
    "join-split": join_split,
    "tensor-split": tensor_split,
    "table-split": table_columns,
    "table-row-split": table_rows,
}


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite, and where it is applied.

    Attributes:
        name: a key of ``REWRITES``.
        parts: parts into which a site is cut; ignored for a join, cut into as many as are joined.
        sites: names of parameters; None for all that allow the rewrite.
    """

    name: str
    parts: int = PARTS
    sites: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in REWRITES:
            raise ValueError(f"rewrite {self.name!r} is none of {', '.join(REWRITES)}")
        if self.parts < 2:
            raise ValueError(f"rewrite {self.name} makes at least 2 parts, not {self.parts}")

    @staticmethod
    def parse(text: str) -> Rewrite:
        """Return the rewrite of a text, as of ``str``: ``join-split``, ``tensor-split=4@a.weight``.

        Raises:
            ValueError: if it is none.
        """
        rule, at, sites = text.partition("@")
        name, equals, parts = rule.partition("=")
        if equals and not (parts.isascii() and parts.isdecimal() and len(parts) < 6):
            raise ValueError(f"rewrite {text!r}: parts are a number, as in {name}=4")
        count = int(parts) if equals else PARTS
        return Rewrite(name, count, tuple(sites.split("+")) if at else None)

    def __str__(self) -> str:
        parts = f"={self.parts}" if self.parts != PARTS else ""
        sites = "" if self.sites is None else f"@{'+'.join(self.sites)}"
        return f"{self.name}{parts}{sites}"


def applicable(program: FlatProgram) -> tuple[str, ...]:
    """Return the rewrites that ``plan`` tries on its own, if the program has a site for them."""
    every = Sites(None)
    joins = (concatenated_widths(p.features, p.dim) for p in products(program, every))
    return ("join-split",) if any(len(widths) > 1 for widths in joins) else ()


def rewrite(program: FlatProgram, rewrites: Sequence[Rewrite]) -> tuple[list[Rewrite], list[str]]:
    """Rewrite a program in place.

    Returns:
        The rewrites with the sites that they were applied to; for each, why others were left.
    """
    applied, reasons = [], []
    for rule in rewrites:
        sites = Sites(rule.sites)
        REWRITES[rule.name](program, sites, rule.parts)
        program.drop_dead()
        applied.append(replace(rule, sites=tuple(sites.rewritten)))
        reasons.append(sites.reasons())
    return applied, reasons


def require_parameters(module: nn.Module, rewrites: Sequence[Rewrite]) -> None:
    """Raise CaptureError if a module lacks a parameter that a rewrite names."""
    names = dict(module.named_parameters(remove_duplicate=False))
    sites = {site for rule in rewrites for site in rule.sites or ()}
    if strange := sorted(site for site in sites if whole_name(site) not in names):
        raise CaptureError(
            f"{type(module).__name__} has no parameter {some(strange)}, which a rewrite is of; a "
            f"plan with such a rewrite is of another model: this one has {some(names)}"
        )


def require_sites(
    module: str, asked: Sequence[Rewrite], applied: Sequence[Rewrite], reasons: Sequence[str]
) -> None:
    """Refuse a rewrite that was asked for and has not changed a program, or not where it was to.

    Raises:
        CaptureError: with the reason.
    """
    for rule, done, why in zip(asked, applied, reasons, strict=True):
        missing = [site for site in rule.sites or () if site not in (done.sites or ())]
        if missing or not done.sites:
            where = f" at {', '.join(missing)}" if missing else ""
            raise CaptureError(f"{rule.name} changes nothing in {module}{where}: {why}")
