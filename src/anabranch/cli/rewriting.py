"""Rewrites of the model that ``plan`` tries, and the words for what they gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli.parsing import usage
from anabranch.cli.source import ModelSource
from anabranch.errors import CaptureError, InfeasiblePlanError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile

TOO_LARGE = ("table-split=4", "tensor-split=4")
"""Rewrites that are tried as well where an operator fits no device."""


def named_rewrites(text: str, source: ModelSource, mode: str) -> tuple[str, ...] | None:
    """The rewrites that the user names; None for ``auto``.

    Raises:
        typer.BadParameter: if one is unknown, or what is planned cannot be rewritten.
    """
    if text in ("auto", "none"):
        return None if text == "auto" and mode == "sync" and not source.is_file else ()
    from anabranch.graph.rewrites import Rewrite  # imports torch

    names = tuple(text.split(","))
    for name in names:
        usage(Rewrite.parse, name)
    if source.is_file:
        raise typer.BadParameter(
            f"{source.model} is a profile, whose operators are measured as they are; --rewrite "
            "needs the model itself, by name or package.module:function"
        )
    if mode != "sync":
        raise typer.BadParameter(
            "--rewrite is for --mode sync: without a flush slices of one parameter would have "
            "versions of different age"
        )
    return names


def required_rewrites(text: str, source: ModelSource, mode: str = "sync") -> tuple[str, ...]:
    """The rewrites that the user names to a verb that does not choose.

    Raises:
        typer.BadParameter: as ``named_rewrites``; or for ``auto``.
    """
    if text == "auto":
        raise typer.BadParameter(
            "--rewrite auto is for plan, which chooses; here name rewrites, such as join-split, "
            "or none"
        )
    return named_rewrites(text, source, mode) or ()


@dataclass
class Tried:
    """Plans for rewrites of one model.

    Attributes:
        plans: rewrites, joined by commas -> their plan, and the profile that it rests on.
        errors: rewrites -> why there is no plan.
    """

    plans: dict[str, tuple[Plan, Profile]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    @property
    def found(self) -> list[Plan]:
        """The plans alone."""
        return [plan for plan, _ in self.plans.values()]

    def origin(self, plan: Plan) -> tuple[tuple[str, ...], Profile] | None:
        """The rewrites and the profile of a plan; None for that of the model as written."""
        for names, (other, profile) in self.plans.items():
            if other is plan:
                return tuple(names.split(",")), profile
        return None

    def document(self) -> dict[str, Any]:
        """Rewrite -> seconds of its step, or why there is no plan."""
        errors = {name: {"error": str(error)} for name, error in self.errors.items()}
        return {name: {"step_s": p.figures.step_s} for name, (p, _) in self.plans.items()} | errors

    def lines(self, chosen: Plan, written: Plan | None) -> Iterator[str]:
        """A line for each rewrite that was tried and is not in the chosen plan."""
        from anabranch.solve import gain_note

        for name, (plan, _) in self.plans.items():
            if plan is not chosen:
                gain = "" if written is None else f", {gain_note(written, plan)}"
                yield f"rewrite {name}: {plan.figures.step_s * 1e3:.2f} ms a step{gain}; not taken"
        for name, error in self.errors.items():
            yield f"rewrite {name}: none, {error}"


def try_rewrites(
    source: ModelSource,
    profile: Profile,
    profile_of: Callable[[ModelSource], Profile],
    search: Callable[[Profile], Plan],
    written: Plan | None,
) -> Tried:
    """Plan the model with each rewrite that may make its step shorter.

    These are those of joins; then, on top of the best, those of tables that hold it up.

    Args:
        profile: of the model as it is written.
        written: the plan of that, None where nothing fits; then ``TOO_LARGE`` are tried, too.
    """
    from anabranch.solve import choose_rewrite, splits_of_tables

    tried = Tried()

    def attempt(*names: str) -> None:
        key = ",".join(names)
        try:
            rewritten = profile_of(replace(source, rewrites=names))
            tried.plans[key] = search(rewritten), rewritten
        except (CaptureError, InfeasiblePlanError) as error:
            tried.errors[key] = error

    for name in (*profile.graph.rewritable, *(() if written else TOO_LARGE)):
        attempt(name)
    best = choose_rewrite(written, tried.found)
    if best is not None and not best.interrupted:
        names, costs = tried.origin(best) or ((), profile)
        for name in splits_of_tables(best, costs):
            attempt(*names, name)
    return tried
