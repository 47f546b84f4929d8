"""Pairs of products as branches: tensor parallelism without collectives.

A range of the features between two products, which are computed elementwise or by heads, has rows
of the first weight and columns of the second one, and the results are added up::

                                          +-- A[0:n] -- gelu -- B[0:n] --+
    x -- A -- gelu -- B    =>    x -------+                              +-- +
                                          +-- A[n:] --- gelu -- B[n:] ---+

(Megatron-LM: Shoeybi et al., 2019, section 3.) Here the ranges are branches of the graph, which a
planner may put on devices of their own, or leave together.
"""

from __future__ import annotations

from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.rewrites.products import products, split_product
from anabranch.graph.rewrites.sites import Sites


def tensor_split(program: FlatProgram, sites: Sites, parts: int) -> None:
    """Rewrite every product behind products as a sum over so many ranges of features."""
    for product in products(program, sites):
        if product.weight not in program.sources:
            continue  # a part of the pair behind it
        if product.width % parts:
            sites.refused[product.site] = f"{product.width} features are not {parts} equal parts"
        else:
            widths = [product.width // parts] * parts
            split_product(program, product, widths, sites, needs_products=True)
