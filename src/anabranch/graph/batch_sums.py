"""Sums over samples that a coupled loss reads, as values that can be sent.

A router's auxiliary loss multiplies two sums over all tokens of a batch, so it is right for the
whole batch only. What it sums is made in the layers, and a sum has no samples that a slice could
have: without more, the loss and all layers before it would be one operator. So such a sum gets one
row per sample, and whoever reads it for the whole batch has the rows of all slices::

    slice         p = probabilities.sum(0)        rows = [p, 0, 0, ...]    or, of a mean, [p, p, p]
    whole batch   p = rows.sum(0)                                          rows.mean(0)
                  loss = (f * p).sum() + ...

What is computed from rows is an operator of its own (``WHOLE_BATCH_LOSS``), and the layers keep
their micro-batches and replicas.
"""

from __future__ import annotations

import torch
from torch import fx

from anabranch.graph.call_traits import base_name, tensor
from anabranch.graph.flat_program import APART, FlatProgram, insert, upstream, written
from anabranch.graph.flows import SampleFlow, above
from anabranch.graph.operations import COUNTS

WHOLE_BATCH_LOSS = "whole_batch_loss"
"""Path of the calls that read rows, and the name of their operator."""

_FOLDED_NUMEL = 4096
"""Numbers of a sum that are sent per sample where what it sums cannot be; so many experts."""

_aten = torch.ops.aten
Sums = tuple[tuple[int, int], ...]


def batch_sums(program: FlatProgram, flow: SampleFlow) -> Sums:
    """Sums that a coupled loss reads, by the position of their call, with their degree."""
    loss = program.outputs[0]
    coupled = above(flow.coupling, loss)
    if not coupled:
        return ()
    led_to = set(upstream(coupled))
    without_samples = set[fx.Node]()
    for node in reversed(program.calls):
        users = [user for user in node.users if user.op != "output"]
        if flow.flows[node].kind != "samples" and without_samples.issuperset(users):
            without_samples.add(node)
    return tuple(
        (position, flow.flows[node].degree)
        for position, node in enumerate(program.calls)
        if node in led_to
        and node in without_samples
        and _is_sum(node, flow)
        and _is_small(node, program, flow)
        and not any(node in written(user) for user in node.users if len(node.users) > 1)
    )


def _is_sum(node: fx.Node, flow: SampleFlow) -> bool:
    """True for a sum or a mean of values with samples, a count included."""
    result = flow.flows[node]
    is_count = result.counts and base_name(node).rstrip("_") in COUNTS | {"sum"}
    is_sum = result.kind == "additive" and result.degree in (0, -1)
    of_samples = any(flow.flows[source].kind == "samples" for source in node.all_input_nodes)
    return (is_sum or is_count) and of_samples and tensor(node) is not None


def _is_small(node: fx.Node, program: FlatProgram, flow: SampleFlow) -> bool:
    """True if rows of a sum take less than what it sums, where that can be sent."""
    value = tensor(node)
    assert value is not None
    inputs = [tensor(n) for n in node.all_input_nodes if flow.flows[n].kind == "samples"]
    sent = [x.numel() // program.samples for x in inputs if x is not None]
    folded = any(x is not None and program.samples not in x.shape for x in inputs)
    return value.numel() <= max([*sent, _FOLDED_NUMEL if folded else 0])


def put_in_rows(program: FlatProgram, calls: list[fx.Node], sums: Sums) -> None:
    """Let the readers of sums have them from rows, in place; ``calls`` are those that the positions
    of the sums count.
    """
    behind = dict[fx.Node, None]()
    for position, degree in sums:
        value = calls[position]
        readers = [user for user in program.calls if value in user.all_input_nodes]
        ones = [1] * value.meta["val"].dim()
        if degree == 0:
            row = insert(readers[0], _aten.unsqueeze.default, value, 0)
            padding = [0, 0] * len(ones) + [0, program.samples - 1]
            rows = insert(readers[0], _aten.constant_pad_nd.default, row, padding)
            total = insert(
                readers[0], _aten.sum.dim_IntList, rows, [0], dtype=rows.meta["val"].dtype
            )
            made = [row, rows]
        else:
            rows = insert(readers[0], _aten.repeat.default, value, [program.samples, *ones])
            total = insert(readers[0], _aten.mean.dim, rows, [0])
            made = [rows]
        for node in made:
            node.meta.pop("nn_module_stack", None)
            node.meta |= {k: v for k, v in value.meta.items() if k == "nn_module_stack"}
        own, shared = total.meta["storage"], value.meta["storage"]
        for reader in readers:
            reader.replace_input_with(value, total)
        behind[total] = None
        for node in program.calls:
            if any(source in behind for source in node.all_input_nodes):
                behind[node] = None
                if node.meta.get("storage") == shared:
                    node.meta["storage"] = own
    for node in behind:
        node.meta |= {"nn_module_stack": {WHOLE_BATCH_LOSS: (f"module.{WHOLE_BATCH_LOSS}", "")}}
        node.meta[APART] = True
