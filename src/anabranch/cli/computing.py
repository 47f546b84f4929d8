"""The options of ``train`` that say how stages are computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anabranch.runtime.compute.options import ComputeOptions

_PANEL = "Computing"

Precision = StrEnum("Precision", ["fp32", "bf16", "fp16"])
DropoutKind = StrEnum("DropoutKind", ["stage", "sample"])

PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="bf16 and fp16 run forwards under autocast; fp16 scales the loss.",
        rich_help_panel=_PANEL,
    ),
]
Compile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="BACKEND",
        help="Compile each stage with torch.compile: inductor, aot_eager, ...",
        rich_help_panel=_PANEL,
    ),
]
OffloadOption = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="Keep activations on the host between forward and backward (GPUs).",
        rich_help_panel=_PANEL,
    ),
]
DropoutOption = Annotated[
    DropoutKind,
    typer.Option(
        "--dropout",
        help="sample: random numbers are the same under any plan.",
        rich_help_panel=_PANEL,
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        "--accumulate", min=1, help="Batches that make one update.", rich_help_panel=_PANEL
    ),
]


@dataclass(frozen=True)
class Computing:
    """What the user asked of the stages."""

    precision: Precision
    backend: str | None
    offload: bool
    dropout: DropoutKind

    def options(self) -> ComputeOptions:
        """As the runtime takes it.

        Raises:
            typer.BadParameter: if there is no such backend.
        """
        from anabranch.runtime.compute.options import ComputeOptions

        try:
            return ComputeOptions(
                precision=self.precision.value,  # type: ignore[arg-type]
                compile=self.backend or False,
                offload=self.offload,
                dropout=self.dropout.value,  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
