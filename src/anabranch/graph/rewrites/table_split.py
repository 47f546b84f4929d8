"""Rewrites of embedding tables into several narrower or shorter ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import fx

from anabranch.graph.call_traits import arguments, base_name
from anabranch.graph.flat_program import FlatProgram, frame
from anabranch.graph.rewrites.calls import Sites, insert, slice_of, sum_tree
from anabranch.graph.rewrites.sliced_values import SlicedValues

aten = torch.ops.aten


def table_columns(program: FlatProgram, sites: Sites, parts: int) -> None:
    """Rewrite tables as ``parts`` tables with fewer columns, whose rows are concatenated."""
    for site, node in _tables(program, sites):
        rows = node
        if base_name(node) != "embedding":
            rows = next((user for user in node.users if user.args[1] == 0), node)
        width = int(arguments(node)["weight"].meta["val"].shape[1])
        if width % parts or not all(user.args[1] == 0 for user in node.users if rows is not node):
            sites.refused[site] = f"{width} columns are not {parts} equal parts"
            continue
        path, behind, step = frame(node) or base_name(node), rows.next, width // parts
        columns = [
            SlicedValues(program, f"{path}[{start}:{start + step}]").at(
                rows, -1, start, start + step
            )
            for start in range(0, width, step)
        ]
        rows.replace_all_uses_with(insert(behind, f"{path}[cat]", aten.cat.default, columns, -1))
        sites.rewritten.append(site)


def table_rows(program: FlatProgram, sites: Sites, parts: int) -> None:
    """Rewrite tables as the sum of tables with fewer rows, which give zeros for other rows."""
    for site, node in _tables(program, sites):
        options = arguments(node)
        count = int(options["weight"].meta["val"].shape[0])
        if base_name(node) != "embedding" or options["scale_grad_by_freq"] or count < parts:
            sites.refused[site] = "only plain look-ups are cut by rows"
            continue
        path = frame(node) or "embedding"
        bounds = [count * i // parts for i in range(parts + 1)]
        terms = [_rows(program, node, path, *bound) for bound in pairwise(bounds)]
        node.replace_all_uses_with(sum_tree(node, path, terms))
        sites.rewritten.append(site)


def _rows(program: FlatProgram, node: fx.Node, path: str, start: int, stop: int) -> fx.Node:
    """Insert the look-up of some rows of a table; it gives zeros for other rows."""
    options, path = arguments(node), f"{path}[{start}:{stop}]"
    table = slice_of(program, options["weight"], 0, start, stop)
    shifted = insert(node, path, aten.sub.Tensor, options["indices"], start)
    row = insert(node, path, aten.clamp.default, shifted, 0, stop - start - 1)
    is_here = insert(node, path, aten.eq.Tensor, shifted, row)
    padding = options["padding_idx"] - start if start <= options["padding_idx"] < stop else -1
    rows = insert(node, path, node.target, table, row, padding, False, options["sparse"])
    mask = insert(node, path, aten.unsqueeze.default, is_here, -1)
    return insert(node, path, aten.mul.Tensor, rows, mask)


def _tables(program: FlatProgram, sites: Sites) -> Iterator[tuple[str, fx.Node]]:
    """Generate the wanted look-ups that are the only reader of a parameter."""
    for node in program.calls:
        if base_name(node) != "embedding" and not base_name(node).endswith("embedding_bag"):
            continue
        weight = arguments(node)["weight"]
        source = program.sources.get(weight)
        if source is None or source.kind != "parameter" or not sites.wants(source.name):
            continue
        if len(weight.users) == 1:
            yield source.name, node
        else:
            sites.refused[source.name] = "it is read elsewhere as well"
