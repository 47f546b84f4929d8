"""The verb ``export``: the model of a checkpoint for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import folder_to_write, note, print_json
from anabranch.cli.settings import AsJson


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="A checkpoint, or the folder of several: the newest."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="A new file NAME.safetensors; or a new folder, which also gets the config.json of "
            "a Hugging Face model.",
            callback=folder_to_write,
        ),
    ],
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Export the part of the module whose names begin so, without it (model.) "
            "[default: that of a Hugging Face model that is all of the module]."
        ),
    ] = None,
    trained: Annotated[
        bool,
        typer.Option(
            "--trained", help="Export what was trained alone, such as adapters; no config.json."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of CKPT as plain safetensors, under the names of its state_dict.

    Tied weights are written once, buffers that are not persistent are left out: as Hugging Face's
    save_pretrained does. A folder is what from_pretrained takes.

    Example: `anabranch export run -o bert`, then `BertForMaskedLM.from_pretrained("bert")`
    """
    from anabranch.checkpoint.export import export as write

    made = write(checkpoint, output, prefix=prefix, trained=trained)
    if made.left_out:
        note(f"{made.left_out} tensors whose names do not begin with {made.prefix} are left out")
    if as_json:
        print_json(asdict(made))
        return
    what = f" of {made.architecture}" if made.architecture else ""
    typer.echo(
        f"written to {made.path}: {made.tensors} tensors{what}, {made.bytes / 2**20:.1f} MiB"
    )
