"""Rewrites of the model as the user names them."""

from __future__ import annotations

import typer

from anabranch.cli.parsing import usage
from anabranch.cli.source import ModelSource


def named_rewrites(text: str, source: ModelSource, mode: str) -> tuple[str, ...] | None:
    """Return the rewrites that the user names; None for ``auto``."""
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
    """Return the rewrites that the user names, for a verb that does not choose them."""
    if text == "auto":
        raise typer.BadParameter(
            "--rewrite auto is for plan, which chooses; here name rewrites, such as join-split, "
            "or none"
        )
    return named_rewrites(text, source, mode) or ()
