"""Rewrites of products with a weight into sums of products over ranges of features."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from anabranch.graph.call_traits import arguments, base_name
from anabranch.graph.flat_program import FlatProgram, frame, schema_name
from anabranch.graph.operations import words
from anabranch.graph.rewrites.calls import NotSliceableError, Sites, insert, slice_of, sum_tree
from anabranch.graph.rewrites.sliced_values import SlicedValues, concatenated_widths
from anabranch.graph.slices import Slice, slice_named

aten = torch.ops.aten

_ARGUMENTS = {
    **dict.fromkeys(words("linear conv1d conv2d conv3d"), ("input", "weight", 1)),
    "matmul": ("self", "other", 0),
    "mm": ("self", "mat2", 0),
    "addmm": ("mat1", "mat2", 0),
}
"""Product -> names of its features and its weight, and the dimension of the weight that is summed
over.
"""


@dataclass(frozen=True, slots=True)
class Product:
    """A product that sums over features.

    Attributes:
        site: name of the weight.
        dim: dimension of ``features`` that is summed over, ``weight_dim`` that of the weight.
    """

    site: str
    node: fx.Node
    features: fx.Node
    weight: fx.Node
    dim: int
    weight_dim: int


def products(program: FlatProgram, sites: Sites) -> list[Product]:
    """Return the wanted products with a parameter, last first."""
    result = []
    for node in reversed(program.calls):
        names = _ARGUMENTS.get(schema_name(node).removeprefix("aten::"))
        if names is None:
            continue
        options = arguments(node)
        features, weight, weight_dim = options[names[0]], options[names[1]], names[2]
        source = program.sources.get(weight)
        if source is None or source.kind != "parameter" or weight.meta["val"].dim() < 2:
            continue
        if sites.wants(source.name):
            dim = 1 if base_name(node).startswith("conv") else features.meta["val"].dim() - 1
            result.append(Product(source.name, node, features, weight, dim, weight_dim))
    return result


def split_product(
    program: FlatProgram,
    product: Product,
    widths: Sequence[int],
    sites: Sites,
    *,
    needs_products: bool = False,
) -> None:
    """Replace a product by the sum of products over ranges of so many features each.

    Nothing is changed, and the reason is noted, where the features have no such slices, or a
    parameter would be read whole as well or cut in two ways.

    Args:
        needs_products: whether parameters behind the features have to be sliced as well.
    """
    try:
        terms, region = _terms(program, product, widths)
        made_by = map(base_name, region - {product.node})
        if needs_products and not any(n in _ARGUMENTS or "embedding" in n for n in made_by):
            raise NotSliceableError("no product makes the features")
        replaced = _replaced(program, region, product.node)
    except NotSliceableError as error:
        program.drop_dead()
        sites.refused.setdefault(product.site, str(error))
        return
    node, path = product.node, frame(product.node) or base_name(product.node)
    total = sum_tree(node, path, terms)
    if base_name(node) == "addmm":
        total = insert(node, f"{path}[bias]", aten.add.Tensor, total, arguments(node)["self"])
    node.replace_all_uses_with(total)
    for old in reversed(program.calls):
        if old in replaced:
            program.graph.erase_node(old)
    program.drop_dead()
    sites.rewritten.append(product.site)


def _terms(
    program: FlatProgram, product: Product, widths: Sequence[int]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Insert the products over ranges of features; return them and the calls that they replace."""
    node, name, options = product.node, base_name(product.node), arguments(product.node)
    if options.get("groups", 1) != 1 or options.get("alpha", 1) != 1 or options.get("beta", 1) != 1:
        raise NotSliceableError(f"{name} has groups or factors")
    features_name, weight_name, _ = _ARGUMENTS[name]
    path = frame(node) or name
    terms: list[fx.Node] = []
    region = {node}
    for start, stop in pairwise(accumulate(widths, initial=0)):
        values = SlicedValues(program, f"{path}[{start}:{stop}]")
        changed: dict[str, Any] = {
            features_name: values.at(product.features, product.dim, start, stop),
            weight_name: slice_of(program, product.weight, product.weight_dim, start, stop),
        }
        if name == "addmm":
            terms.append(insert(node, values.path, aten.mm.default, *changed.values()))
        else:
            without_bias = {"bias": None} if terms and "bias" in options else {}
            terms.append(values.call(node, changed | without_bias))
        region |= values.visited
    return terms, region


def _replaced(program: FlatProgram, region: set[fx.Node], product: fx.Node) -> set[fx.Node]:
    """Return the calls of a region that nothing reads once the product is replaced.

    Raises:
        NotSliceableError: if a parameter of which slices are read would be read whole as well, or
            in other slices that overlap these.
    """
    replaced = {product}
    for node in reversed(program.calls):
        if node in region and node.users.keys() <= replaced:
            replaced.add(node)
    sliced = {part.whole for s in program.sources.values() if (part := slice_named(s.name))}
    cuts: defaultdict[str, set[Slice]] = defaultdict(set)
    for node, source in program.sources.items():
        if node.users.keys() <= replaced:
            continue
        if source.name in sliced:
            raise NotSliceableError(f"{source.name} is read elsewhere as well")
        part = slice_named(source.name)
        while part is not None:
            cuts[part.whole].add(part)
            part = slice_named(part.whole)
    for name, parts in cuts.items():
        ordered = sorted(parts, key=lambda part: part.start)
        if any(a.dim != b.dim or b.start < a.stop for a, b in pairwise(ordered)):
            raise NotSliceableError(f"{name} is read elsewhere in other slices")
    return replaced


def join_split(program: FlatProgram, sites: Sites, _parts: int) -> None:
    """Rewrite every product with a concatenation as a sum of products, one per input::

        a --+                              a -- A --+
        b --+-- cat -- [A B C] --    =>    b -- B --+-- + -- +
        c --+                              c -- C ---------- +

    So weights of a join, and elementwise calls behind it, are with the branches; only sums meet.
    """
    for product in products(program, sites):
        widths = concatenated_widths(product.features, product.dim)
        if len(widths) > 1:
            split_product(program, product, widths, sites)


def tensor_split(program: FlatProgram, sites: Sites, parts: int) -> None:
    """Rewrite every product behind products as a sum over so many ranges of features.

    A range has rows of the first weight and columns of the second one: tensor parallelism without
    collectives (Megatron-LM: Shoeybi et al., 2019, section 3), as branches that a planner may put
    on devices of their own, or leave together::

                                              +-- A[0:n] -- gelu -- B[0:n] --+
        x -- A -- gelu -- B    =>    x -------+                              +-- +
                                              +-- A[n:] --- gelu -- B[n:] ---+
    """
    for product in products(program, sites):
        if product.weight not in program.sources:
            continue  # a part of the pair behind it
        width, rest = divmod(product.weight.meta["val"].shape[product.weight_dim], parts)
        if rest:
            count = parts * width + rest
            sites.refused[product.site] = f"{count} features are not {parts} equal parts"
        else:
            split_product(program, product, [width] * parts, sites, needs_products=True)
