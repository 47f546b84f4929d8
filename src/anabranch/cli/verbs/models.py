"""The verb ``models``: the built-in models with their options."""

from __future__ import annotations

import typer

from anabranch.cli.output import print_json
from anabranch.cli.settings import AsJson


def models(as_json: AsJson = False) -> None:
    """List the built-in models with their options."""
    from anabranch.models import MODELS, options_of

    options = {name: options_of(name) for name in MODELS}
    if as_json:
        listed = [{"name": n, "about": a, "options": options[n]} for n, a in MODELS.items()]
        print_json({"models": listed})
        return
    for name, about in MODELS.items():
        typer.echo(f"{name}: {about}")
        for option, defaults in options[name].items():
            shown = ", ".join(f"{preset} {value}" for preset, value in defaults.items())
            typer.echo(f"    -o {option}=...   [{shown}]")
