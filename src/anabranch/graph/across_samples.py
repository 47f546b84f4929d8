"""Calls that compute across the samples of a value, or take samples by their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from anabranch.graph.call_traits import arguments, base_name, dims_along, is_integer, tensor
from anabranch.graph.operations import ALONG, CONVOLUTIONS, RECURRENT, SCATTERS
from anabranch.graph.sample_axis import RAGGED, SampleAxis, is_in_order


def is_index(node: fx.Node, index: fx.Node, axes: Mapping[fx.Node, SampleAxis]) -> bool:
    """True if a call reads a value as places of samples, as torch.arange(n) has them: they are
    those in its slice.
    """
    options, source = arguments(node), node.all_input_nodes[0]
    dim, value = axes.get(source, SampleAxis(-1)).dim, tensor(source)
    indices = options.get("indices", options.get("index"))
    if isinstance(indices, list | tuple):
        return is_integer(index) and index in indices and indices.index(index) == dim
    is_along = value is not None and dim in dims_along(node, value.dim())
    return (indices is index and is_along) or options.get("offsets") is index


def is_across(
    node: fx.Node, axes: Mapping[fx.Node, SampleAxis], samples: int, known: Collection[fx.Node]
) -> bool:
    """True for an operation across the samples of its first input whose result has samples.

    Args:
        known: inputs that are known before the forward begins.
    """
    source, name = node.all_input_nodes[0], base_name(node).rstrip("_")
    axis, value = axes.get(source, SampleAxis(-1)), tensor(source)
    if value is None:
        return False
    dim, rank, options = axis.dim, value.dim(), arguments(node)
    if axis.trouble == RAGGED:
        dim = next(d for d, n in enumerate(value.shape) if not isinstance(n, int))
    if dim < 0:
        return False
    index = dict(enumerate(options["indices"])).get(dim) if name == "index" else None
    if name in ("gather", "index_select") and dim in dims_along(node, rank):
        index = options["index"]
    if index is not None and not is_in_order(index):
        # What is known of the batch alone names samples of all of it.
        place, is_sample = axes[index], value.shape[dim] == samples
        is_known = index in known and place.dim >= 0 and not place.trouble
        return axis.trouble == RAGGED or (is_known and is_sample)
    if name in ALONG | SCATTERS:
        return dim in dims_along(node, rank)
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return dim >= rank - len(options["normalized_shape"])
    if name in ("group_norm", "native_group_norm", "instance_norm") or name in CONVOLUTIONS:
        return dim > 0
    if name in RECURRENT:
        return dim == bool(options.get("batch_first", True))
    return ("scaled_dot_product" in name or name in ("tril", "triu")) and dim >= rank - 2
