"""Profile files that the user names as the model: our own, PipeDream's and DAPPLE's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anabranch.cli.output import note
from anabranch.cli.parsing import parse_counts, usage

if TYPE_CHECKING:
    from anabranch.profile.profile import Profile


def read_profile_file(
    model: str, options: Mapping[str, str], device: str, samples: tuple[int, ...] | None
) -> Profile:
    """The profile in a file; what its seconds are of is said where another device is asked for.

    Args:
        options: that the user gives for the model.
        samples: sample counts that the user asks for, if any.
    """
    from anabranch.files import load_profile
    from anabranch.files.pipedream import is_foreign, read_profile

    path = Path(model)
    if is_foreign(path):
        profile = usage(read_profile, path, _samples(model, options, samples))
    elif options or samples:
        names = ", ".join([*options, *(["--samples"] if samples else [])])
        raise typer.BadParameter(f"{model} is a profile; options ({names}) do nothing")
    else:
        profile = load_profile(path)
    if profile.source == "imported":
        note(
            f"{model} is imported: its seconds are those of {profile.device}, whatever device is "
            "asked for"
        )
    elif profile.device.split(":")[0] != device.split(":")[0]:
        note(
            f"{model} has times for {profile.device}, but {device} is asked for: the seconds below "
            "are those of the former"
        )
    return profile


def _samples(model: str, options: Mapping[str, str], counts: tuple[int, ...] | None) -> int | None:
    """Samples in a mini-batch of another project's profile, if the user says so."""
    if unknown := ", ".join(name for name in options if name != "samples"):
        raise typer.BadParameter(f"{model} is a profile; its only option is samples, not {unknown}")
    counts = parse_counts(options["samples"]) if "samples" in options else counts
    if counts and len(counts) > 1:
        raise typer.BadParameter(
            f"{model} was measured with one mini-batch; say how many samples that had, one number, "
            f"not {', '.join(map(str, counts))}"
        )
    return counts[0] if counts else None
