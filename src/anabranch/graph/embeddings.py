"""Tables of embeddings: parameters of which a step reads some rows only, and has gradients only
there.

``nn.Embedding`` and ``nn.EmbeddingBag`` give such a gradient as a sparse tensor where they are told
so (``sparse=True``), which takes the memory of the rows that were looked up, not of the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from anabranch.graph.call_traits import CallTraits, arguments, base_name, tensor
from anabranch.graph.flat_program import PARAMETER
from anabranch.graph.operations import LOOKUPS
from anabranch.graph.opgraph import LookupTable

_SUMS = (0, 1)
"""Modes of a bag whose gradient may be sparse, the sum and the mean; not the maximum."""


def tables(traits: CallTraits) -> Mapping[str, LookupTable]:
    """The parameters that are only looked up in, by rows that the batch names."""
    tables_by_name = {}
    for node, source in traits.program.sources.items():
        weight = tensor(node)
        if source.kind != PARAMETER or weight is None or weight.dim() != 2:
            continue
        lookups = [_lookups(user, node, traits) for user in node.users]
        if lookups and all(lookups):
            row_bytes = weight.shape[1] * weight.element_size()
            declared = all(arguments(user)["sparse"] for user in node.users)
            tables_by_name[source.name] = LookupTable(sum(lookups), row_bytes, declared)
    return tables_by_name


def _lookups(call: fx.Node, weight: fx.Node, traits: CallTraits) -> int:
    """Rows that a call looks up for each sample; 0 if it is anything but a lookup by the batch."""
    if not _may_be_sparse(call) or call.all_input_nodes.count(weight) != 1:
        return 0
    options, twins = arguments(call), arguments(traits.twins[call])
    if options["weight"] is not weight:
        return 0
    few, many = (given["indices"].meta["val"].numel() for given in (options, twins))
    rows, samples = many - few, traits.sizes[1] - traits.sizes[0]
    is_by_sample = rows > 0 and rows * traits.sizes[0] == few * samples
    return int(rows // samples) if is_by_sample else 0


def _may_be_sparse(call: fx.Node) -> bool:
    if call.op != "call_function" or base_name(call) not in LOOKUPS:
        return False
    options = arguments(call)
    if options["scale_grad_by_freq"] or options.get("per_sample_weights") is not None:
        return False
    return options.get("mode") in (None, *_SUMS)


def make_sparse(graph: fx.Graph) -> int:
    """Let lookups give sparse gradients, in place; how many calls that were."""
    count = 0
    for call in graph.nodes:
        if _may_be_sparse(call) and not arguments(call)["sparse"]:
            call.args = tuple((arguments(call) | {"sparse": True}).values())
            call.kwargs = {}
            count += 1
    return count
