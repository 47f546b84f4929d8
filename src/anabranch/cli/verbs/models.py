"""The verb ``models``: the built-in models with their options."""

from __future__ import annotations

from anabranch.cli.output import print_json, say
from anabranch.cli.spread import spread


@spread
def models() -> None:
    """List the built-in models with their options."""
    from anabranch.models import MODELS, options_of

    options = {name: options_of(name) for name in MODELS}
    listed = [{"name": n, "about": a, "options": options[n]} for n, a in MODELS.items()]
    print_json({"models": listed})
    for name, about in MODELS.items():
        say(f"{name}: {about}")
        for option, defaults in options[name].items():
            shown = ", ".join(f"{preset} {value}" for preset, value in defaults.items())
            say(f"    -o {option}=...   [{shown}]")
