"""The verb ``profile``: what the operators of a model take."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.output import print_json, print_table, say, say_written
from anabranch.cli.parsing import parse_counts
from anabranch.cli.settings import EstimatedModelSettings
from anabranch.cli.spread import spread
from anabranch.device.kinds import GPU


@spread
def profile(
    model: EstimatedModelSettings,
    device: Annotated[
        str,
        typer.Option(help=f"cpu or {GPU}: measure here; v100, a100, h100, h200 or b200: estimate."),
    ] = "cpu",
    samples: str | None = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    """Measure the operators of MODEL, or estimate them for a GPU.

    Example: `anabranch profile mmt --device v100 --batch-size 512 -o mmt-v100.json`

    Args:
        samples: Sample counts, such as 1,2,4 [default: powers of two up to --batch-size].
        batch_size: Samples of one step.
    """
    counts = parse_counts(samples) if samples else None
    source = model.source
    result = source.profile(device, batch_size, counts)
    file = model.file
    if file is not None:
        from anabranch.files import save_profile

        save_profile(result, file)
    forward = sum(cost.forward_s[-1] for cost in result.costs)
    backward = sum(cost.backward_s[-1] for cost in result.costs)
    parameter_bytes = sum(result.graph.parameter_bytes.values())
    print_json(
        {
            "model": model.model,
            "operators": len(result.graph),
            "samples": list(result.samples),
            "forward_s": forward,
            "backward_s": backward,
            "parameter_bytes": parameter_bytes,
            "source": result.source,
            "device": result.device,
            "file": file,
            **source.facts,
        }
    )
    rows = [
        [
            op.name,
            op.kind,
            f"{cost.forward_s[-1] * 1e3:.3f}",
            f"{cost.backward_s[-1] * 1e3:.3f}",
            f"{cost.kept_bytes / 1024:.1f}",
        ]
        for op, cost in zip(result.graph.ops, result.costs, strict=True)
    ]
    columns = ["operator", "kind", "forward ms", "backward ms", "kept KiB/sample"]
    print_table(f"{model.model}: {result.origin}", columns, rows)
    say(
        f"{len(rows)} operator{'s' if len(rows) > 1 else ''}, "
        f"{parameter_bytes / 2**20:.1f} MiB of parameters; "
        f"with {result.samples[-1]} samples forward {forward * 1e3:.2f} ms, "
        f"backward {backward * 1e3:.2f} ms"
    )
    say_written(file)
