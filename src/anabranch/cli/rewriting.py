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
        plans: rewrite -> its plan, and the profile that it rests on.
        errors: rewrite -> why there is no plan.
    """

    plans: dict[str, tuple[Plan, Profile]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Rewrite -> seconds of its step, or why there is no plan."""
        errors = {name: {"error": str(error)} for name, error in self.errors.items()}
        return {name: {"step_s": p.figures.step_s} for name, (p, _) in self.plans.items()} | errors

    def lines(self, chosen: Plan, written: Plan | None) -> Iterator[str]:
        """A line for each rewrite that was tried."""
        for name, (plan, _) in self.plans.items():
            step = f"{name}: {plan.figures.step_s * 1e3:.2f} ms a step"
            if written is not None:
                gain = written.figures.step_s / plan.figures.step_s
                as_written = f"{written.figures.step_s * 1e3:.2f} ms as the model is written"
                step += f", {gain:.2f}x against {as_written}"
            yield f"rewrite {step}{'' if plan is chosen else '; not taken'}"
        for name, error in self.errors.items():
            yield f"rewrite {name}: none, {error}"


def try_rewrites(
    source: ModelSource,
    profile: Profile,
    profile_of: Callable[[ModelSource], Profile],
    search: Callable[[Profile], Plan],
    *,
    fits: bool,
) -> Tried:
    """Plan the model with each rewrite that it has sites for.

    Args:
        profile: of the model as it is written.
        fits: whether there is a plan of that; otherwise ``TOO_LARGE`` are tried, too.
    """
    tried = Tried()
    for name in (*profile.graph.rewritable, *(() if fits else TOO_LARGE)):
        try:
            rewritten = profile_of(replace(source, rewrites=(name,)))
            tried.plans[name] = search(rewritten), rewritten
        except (CaptureError, InfeasiblePlanError) as error:
            tried.errors[name] = error
    return tried
