"""Operations that keep folded samples in order, or do not, compared by numbers.

Sizes do not tell the order of samples that share a dimension with something else, and an operator
of another library may do anything. So the example is computed again with its samples rotated, and
once more with the first two exchanged. An operation that keeps the order gives the same result,
rearranged in the same way; from three samples on, no other operation does so both times::

    v  = f(a, b, c)            f = identity     f = reversal
    f(c, a, b)  against  v rotated      =       b a c  against  a c b
    f(b, a, c)  against  v exchanged    =       c a b  against  b c a
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from anabranch.graph.batch_layout import BatchLayout
from anabranch.graph.call_traits import SampleAxis, keyed, tensor
from anabranch.graph.flat_program import CallKey, upstream
from anabranch.graph.programs import Programs
from anabranch.graph.samples.sample_axis import blocks, is_order_known, sample_axes

TOLERANCE = 1e-2
"""Error from rounding, as a share of what rearranging samples changes."""


def uncertain_calls(programs: Programs, folded: Collection[int]) -> frozenset[CallKey]:
    """Return the calls on which ``folded`` values (positions of calls) depend, if neither operation
    nor sizes tell that their results have the samples in order; none where there are no numbers to
    compare.
    """
    samples, device = programs.samples, programs.exporter.device
    if not folded or device.type == "meta":
        return frozenset()
    program, other = (programs.at(n, device=device) for n in (samples, 2 * samples))
    axes = sample_axes(program, other)
    keys = {node: key for key, node in keyed(program.calls)}
    sent = [node for call, node in enumerate(program.calls) if call in folded]
    return frozenset(
        keys[node]
        for node in upstream(sent)
        if node in keys and _is_folded(axes.get(node), tensor(node), samples)
        if not is_order_known(node)
    )


def _is_folded(axis: SampleAxis | None, value: Tensor | None, samples: int) -> bool:
    if axis is None or value is None or axis.dim < 0 or axis.trouble:
        return False
    return axis.is_folded(value.shape, samples)


def reordering_calls(
    programs: Programs, layout: BatchLayout, calls: Collection[CallKey]
) -> frozenset[CallKey]:
    """Return the calls that bring folded samples into another order, or of which the example does
    not tell, as all of its samples have the same value.

    Args:
        programs: programs of a module with values, in evaluation mode, so without dropout.

    Raises:
        CaptureError: if the module does not run with three samples, or as many as the example has.
        RuntimeError: if an operator does not run on this machine.
    """
    samples = max(3, programs.samples)
    program, other = programs.at(samples), programs.at(2 * samples)
    nodes = {node: key for key, node in keyed(program.calls) if key in calls}
    axes = sample_axes(program, other)
    order = torch.arange(samples)
    exchanged = torch.cat([order[:2].flip(0), order[2:]])
    orders = order, order.roll(1), exchanged
    leaves = dict(zip(layout.names, layout.resized(samples, programs.exporter.device), strict=True))
    runs = []
    for rows in orders:
        batch = {name: leaf[rows.to(leaf.device)] for name, leaf in leaves.items()}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tensors = programs.with_statistics(batch)
            runs.append(programs.run(program, tensors, wanted=[*nodes]))
    kept = {
        nodes[node]
        for node, first, *values in zip(nodes, *runs, strict=True)
        if all(
            _is_rearranged(first, value, rows, axes[node], samples)
            for value, rows in zip(values, orders[1:], strict=True)
        )
    }
    return frozenset(calls) - kept


def _is_rearranged(
    before: Tensor, after: Tensor, rows: Tensor, axis: SampleAxis, samples: int
) -> bool:
    """True if a value is one from before with its samples in the order of ``rows``, and differs."""
    if before.shape != after.shape or not before.numel():
        return False
    shape = blocks(axis, before.shape, samples)
    old, new = (value.cpu().reshape(shape) for value in (before, after))
    if not old.is_complex():
        old, new = old.double(), new.double()
    expected = old[:, rows]
    error, change = ((value - expected).abs().max() for value in (new, old))
    return bool(error < TOLERANCE * change)
