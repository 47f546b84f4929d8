"""Products with a concatenation as sums of products, one per input.

A linear layer on the concatenation of branches is the sum of one linear layer per branch::

    a --+                              a -- A --+
    b --+-- cat -- [A B C] --    =>    b -- B --+-- + -- +
    c --+                              c -- C ---------- +

So the weights of a join are with the branches, and only sums meet. The same holds for a matrix
product, and for a convolution of concatenated channels; elementwise calls in between are done per
branch.
"""

from __future__ import annotations

from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.rewrites.products import products, split_product
from anabranch.graph.rewrites.sites import Sites
from anabranch.graph.rewrites.sliced_values import concatenated_widths


def join_split(program: FlatProgram, sites: Sites, _parts: int) -> None:
    """Rewrite every product with a concatenation as a sum of products."""
    for product in products(program, sites):
        widths = concatenated_widths(product.features, product.dim)
        if len(widths) > 1:
            split_product(program, product, widths, sites)
