"""Numerical comparison of the two halves of an example with the whole.

It decides what the graph does not show: whether an operator of another library computes across the
samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from anabranch.graph.batch_layout import BatchLayout
from anabranch.graph.flat_program import BATCH_LEAF, BUFFER, PARAMETER, PlaceholderSource
from anabranch.graph.programs import Programs
from anabranch.graph.slices import view_named, whole_name

TOLERANCE = 1e-2
"""Relative difference that rounding may make, in half precision as well; a loss that compares
samples differs by tens of percent."""


def halves_agree(
    programs: Programs, layout: BatchLayout, degrees: Mapping[str, int | None]
) -> bool:
    """Compare loss and metrics of the example's halves with those of the whole example.

    Args:
        programs: of a module with values, in evaluation mode, so that nothing is dropped out.
        degrees: the loss and the metrics, in the order of the programs' outputs, see ``Captured``.

    Raises:
        CaptureError: if the module does not run with as many samples.
        RuntimeError: if an operator does not run on this machine.
    """
    half = max(1, layout.samples // 2)
    resized = layout.resized(2 * half, programs.exporter.device)
    tensors = programs.with_statistics(dict(zip(layout.names, resized, strict=True)))
    slices = (0, 2 * half), (0, half), (half, 2 * half)
    whole, *parts = (
        _outputs(programs, {name: tensor[start:stop] for name, tensor in tensors.items()})
        for start, stop in slices
    )
    return all(
        math.isclose(sum(part) * 2.0**degree, total, rel_tol=TOLERANCE, abs_tol=1e-6)
        for degree, total, *part in zip(degrees.values(), whole, *parts, strict=True)
        if degree is not None
    )


def _outputs(programs: Programs, tensors: Mapping[str, Tensor]) -> list[float]:
    """Loss and metrics of the samples in ``tensors``."""
    program = programs.at(int(next(iter(tensors.values())).shape[0]))
    module = programs.module

    def find(source: PlaceholderSource) -> Tensor:
        if source.kind == BATCH_LEAF:
            return tensors[source.name]
        if source.kind == PARAMETER:
            return view_named(source.name, module.get_parameter(whole_name(source.name)))
        is_buffer = source.kind == BUFFER
        value = module.get_buffer(source.name) if is_buffer else program.constants[source.name]
        return value.clone()  # a program may count its calls in a buffer

    return list(map(float, program.run(find)))
