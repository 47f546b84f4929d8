"""Samples that are folded into a dimension with something else, unfolded between modules.

A tower that has the frames of all samples in one dimension, or two views of every sample joined by
``torch.cat``, makes values that slices of the samples do not cut. Where another module reads such a
value, it gets a view that can be cut, and thus sent, and each reader a view back::

    v: [n * f, l]     u = v.unflatten(0, [1, n, f])     w = u.flatten(0, 2)     reader(w)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from anabranch.graph.call_traits import CallTraits, keyed, tensor
from anabranch.graph.flat_program import UNFOLDS, CallKey, FlatProgram, frame, insert
from anabranch.graph.group import Grouping
from anabranch.graph.sample_axis import sample_axes

Folded = Mapping[CallKey, tuple[int, int, int]]
"""Calls with folded samples: their dimension, and how many indices each sample has outside and
inside of the samples there."""


def folded(
    program: FlatProgram,
    other: FlatProgram,
    known: Folded | None = None,
    reordering: Collection[CallKey] = (),
) -> Folded:
    """Calls with folded samples that another module reads; or the ``known`` ones in a program of
    another mode or other sizes. ``other`` and ``reordering`` as in ``sample_axes``.
    """
    traits, axes = CallTraits(program, other), sample_axes(program, other, reordering)
    result = {}
    for key, node in keyed(program.calls):
        axis, value = axes.get(node), tensor(node)
        if value is None or axis is None or axis.dim < 0 or axis.trouble or traits.free[node]:
            continue
        outer = value.shape[axis.dim] // (program.samples * axis.inner)
        is_read = any(frame(user) != frame(node) for user in node.users if user.op != "output")
        # Dropout is not there in evaluation mode; what reads it is.
        is_stable = "dropout" not in key[1] and node.meta["storage"] not in traits.last_writes
        is_new = outer * axis.inner > 1 and is_read and is_stable
        if is_new if known is None else key in known:
            result[key] = axis.dim, outer, axis.inner
    return result


def unfold(program: FlatProgram, calls: Folded) -> FlatProgram:
    """The same program, in place, with views of these calls that can be cut by samples."""
    for key, node in keyed(program.calls):
        if key not in calls:
            continue
        dim, outer, inner = calls[key]
        readers = [user for user in program.calls if user in node.users]
        sizes = [outer, program.samples, inner]
        view = insert(node.next, torch.ops.aten.unflatten.int, node, dim, sizes, origin=node)
        view.meta[UNFOLDS] = key
        for reader in readers:
            back = insert(reader, torch.ops.aten.flatten.using_ints, view, dim, dim + 2)
            reader.replace_input_with(node, back)
    return program


def sent_views(
    program: FlatProgram, other: FlatProgram, views: Folded, grouping: Grouping
) -> tuple[Folded, Grouping]:
    """The views that lead from one operator to another; the rest is taken out of the programs."""
    owner_of = grouping.owner_of(program)
    kept = {
        node.meta[UNFOLDS]
        for node in program.calls
        if UNFOLDS in node.meta and any(owner_of[user] != owner_of[node] for user in node.users)
    }
    removed = _fold(program, kept)
    _fold(other, kept)
    owners = tuple(owner for i, owner in enumerate(grouping.owners) if i not in removed)
    sent = {key: sizes for key, sizes in views.items() if key in kept}
    return sent, replace(grouping, owners=owners)


def _fold(program: FlatProgram, kept: Collection[CallKey]) -> set[int]:
    """Take out the views of other calls, in place; returns the positions that they had."""
    removed = set()
    for i, node in enumerate(calls := program.calls):
        view = next((n for n in (node, *node.all_input_nodes) if UNFOLDS in n.meta), None)
        if view is not None and view.meta[UNFOLDS] not in kept:
            removed.add(i)
            if node is not view:
                node.replace_all_uses_with(view.all_input_nodes[0])
    for i in sorted(removed, reverse=True):
        program.graph.erase_node(calls[i])
    return removed
