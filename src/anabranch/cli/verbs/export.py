"""The verb ``export``: the model of a checkpoint for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import folder_to_write, note, print_json, say
from anabranch.cli.spread import spread


@spread
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT")],
    output: Annotated[Path, typer.Option("-o", "--output", callback=folder_to_write)],
    prefix: str | None = None,
    trained: Annotated[bool, typer.Option("--trained")] = False,
    dcp: Annotated[bool, typer.Option("--dcp")] = False,
    optimizer: Annotated[str | None, typer.Option(metavar="CLASS")] = None,
) -> None:
    """Write the model of CKPT as plain safetensors.

    Names are those of its state_dict; tied weights are written once, buffers that are not
    persistent are left out: as Hugging Face's save_pretrained does. A folder is what
    from_pretrained takes.

    Examples:

    - `anabranch export run -o bert`, then `BertForMaskedLM.from_pretrained("bert")`
    - `anabranch export run -o torch-run --dcp`
    - `anabranch export torch-run -o run --dcp --optimizer AdamW`

    Args:
        checkpoint: A checkpoint, or the folder of several: the newest.
        output: A new file NAME.safetensors; or a new folder, which also gets the config.json of a
            Hugging Face model.
        prefix: Export the part of the module whose names begin so, without it (model.) [default:
            that of a Hugging Face model that is all of the module].
        trained: Export trained parameters alone, such as adapters; no config.json.
        dcp: All of CKPT, with the optimizer, as a checkpoint of torch.distributed.checkpoint; where
            CKPT is one of those, as a checkpoint that train --resume takes.
        optimizer: With --dcp: class of the optimizer that PyTorch saved: AdamW.
    """
    from anabranch.checkpoint.export import export as write

    if optimizer is not None and not dcp:
        raise typer.BadParameter("--optimizer is for --dcp")
    if dcp:
        if prefix is not None or trained:
            raise typer.BadParameter("--prefix, --trained: --dcp takes all of a checkpoint")
        from anabranch.checkpoint import distributed

        if distributed.is_distributed(checkpoint):
            converted = distributed.from_distributed(checkpoint, output, optimizer=optimizer)
        else:
            converted = distributed.to_distributed(checkpoint, output)
        print_json(asdict(converted))
        tensors = f"{converted.tensors} tensors, {converted.optimizer_tensors} of the optimizer"
        say(f"written to {converted.path}: {tensors}")
        return
    made = write(checkpoint, output, prefix=prefix, trained=trained)
    if made.left_out:
        note(f"{made.left_out} tensors whose names do not begin with {made.prefix} are left out")
    print_json(asdict(made))
    what = f" of {made.architecture}" if made.architecture else ""
    say(
        f"written to {made.path}: {made.tensors} tensors{what}, {made.bytes / 2**20:.1f} MiB, "
        f"from {made.checkpoint}"
    )
