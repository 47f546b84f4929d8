"""Statistics of a whole batch, put into the programs of its slices.

A loss that is divided by a count of the batch's labels is that of the batch only if every slice
divides by the count of the batch. Counts depend on nothing that is learned, so they are known
before the forward begins, and enter as tensors of the batch with one row per sample::

    loss = sum(entries of the slice) / count of the slice
                                                         row of a sample: count of the batch / n
    loss = sum(entries of the slice) / sum(rows of the slice)

A slice's share of the count is that of its samples, so the loss of the batch stays the mean over
samples of those of its slices. Where all labels count, nothing changes, not in one bit.

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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from anabranch.graph.call_traits import arguments, base_name, has_classes, tensor
from anabranch.graph.flat_program import (
    APART,
    BATCH_LEAF,
    FlatProgram,
    PlaceholderSource,
    insert,
    set_value,
    upstream,
    written,
)
from anabranch.graph.flows import SampleFlow, above
from anabranch.graph.operations import BY_CLASS, COUNTS, REDUCED, words

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
    values = [tensor(n) for n in node.all_input_nodes if flow.flows[n].kind == "samples"]
    inputs = [x for x in values if x is not None]
    # What a mask selects has a size that depends on the data.
    sized = [x for x in inputs if all(isinstance(size, int) for size in x.shape)]
    sent = [x.numel() // program.samples for x in sized]
    folded = len(sized) < len(inputs) or any(program.samples not in x.shape for x in sized)
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


_COUNTED = words("cross_entropy_loss nll_loss_nd")
_BY_ROW = words("cosine_embedding_loss triplet_margin_loss")
_NOT_SUMMED = BY_CLASS | words("ctc_loss multi_margin_loss multilabel_margin_loss")
"""Losses whose mean is no sum over a count, or whose sum over nothing is undefined in PyTorch."""
_MEAN, _SUM = 1, 2


def counted_means(program: FlatProgram) -> FlatProgram:
    """The same program, in which a mean over the classes that are not ignored is a sum over a count
    of them.
    """
    for node in program.calls:
        if base_name(node) not in _COUNTED or not has_classes(node):
            continue
        options = arguments(node)
        if options["reduction"] != _MEAN:
            continue
        count = _count(node, options)
        total = insert(node, node.target, *(options | {"reduction": _SUM}).values())
        node.replace_all_uses_with(insert(node, _aten.div.Tensor, total, count))
        program.graph.erase_node(node)
    return program


def chosen_means(program: FlatProgram) -> FlatProgram:
    """The same program, in which a mean over the entries that a mask chooses, ``x[mask].mean()``,
    is a sum over a count of them.
    """
    losses = REDUCED - _NOT_SUMMED
    for node in program.calls:
        if (name := base_name(node)) not in losses | {"mean", "div"}:
            continue
        options, read = arguments(node), node.all_input_nodes
        if name == "div" and len(read) == 2 and base_name(read[1]) == "sym_size":
            # x[mask].sum() / len(x[mask])
            count = _chosen_count(node, read[1].all_input_nodes[0], by_row=True)
            if count is not None:
                node.replace_input_with(read[1], count)
            continue
        is_mean = node.target is _aten.mean.default
        is_loss = name in losses and options.get("reduction") == _MEAN
        count = _chosen_count(node, read[0], by_row=name in _BY_ROW) if is_mean or is_loss else None
        if count is None:
            continue
        target = _aten.sum.default if is_mean else node.target
        summed = options if is_mean else options | {"reduction": _SUM}
        by_name = [a.name for a in target._schema.arguments if a.kwarg_only]  # type: ignore[union-attr]
        keywords = {name: summed.pop(name) for name in by_name if name in summed}
        total = insert(node, target, *summed.values(), **keywords)
        node.replace_all_uses_with(insert(node, _aten.div.Tensor, total, count))
        program.graph.erase_node(node)
    return program


def _chosen_count(before: fx.Node, chosen: fx.Node, *, by_row: bool = False) -> fx.Node | None:
    """The number of entries, or of rows, of a value of which a mask decides the size; None for
    others.
    """
    value = tensor(chosen)
    if value is None or len(free := [n for n in value.shape if not isinstance(n, int)]) != 1:
        return None
    if (mask := _mask_of(chosen, str(free[0]))) is None:
        return None
    count = insert(before, _aten.sum.default, mask)
    row_size = 1 if by_row else math.prod(n for n in value.shape if isinstance(n, int))
    return count if row_size == 1 else insert(before, _aten.mul.Tensor, count, row_size)


def _mask_of(node: fx.Node, size: str) -> fx.Node | None:
    """The mask whose entries that are true make a size."""
    while node.op == "call_function":
        for source in node.all_input_nodes:
            values = [v for v in tree_leaves(source.meta["val"]) if isinstance(v, Tensor)]
            if any(str(n) == size for v in values for n in v.shape):
                node = source
                break
        else:
            break
    read, *others = [*node.all_input_nodes, node]
    masks = [n for n in others[:-1] if (v := tensor(n)) is not None and v.dtype is torch.bool]
    kind, like = base_name(node), tensor(read)
    if len(others) != 2 or len(masks) != 1 or kind not in ("index", "masked_select"):
        return None
    same = like is not None and like.shape == masks[0].meta["val"].shape
    return masks[0] if kind == "index" or same else None


def _count(loss: fx.Node, options: Mapping[str, Any]) -> fx.Node:
    """Targets that are not ignored, each by the weight of its class."""
    counts = insert(loss, _aten.ne.Scalar, options["target"], options["ignore_index"])
    if options["weight"] is not None:
        classes = insert(loss, _aten.mul.Tensor, options["target"], counts)
        flat = insert(loss, _aten.flatten.using_ints, classes)
        weights = insert(loss, _aten.index_select.default, options["weight"], 0, flat)
        kept = insert(loss, _aten.flatten.using_ints, counts)
        counts = insert(loss, _aten.mul.Tensor, weights, kept)
    return insert(loss, _aten.sum.default, counts)


@dataclass(frozen=True)
class WholeBatch:
    """Calls that read statistics, by positions in the program, equal for any number of samples.

    Attributes:
        statistics: calls whose values are needed of the whole batch; those in ``shares`` as the
            share of a slice, which then is a sum over rows.
        uses: (reading call, number of the statistic).
        sums: calls whose values reach a coupled loss as rows, see ``batch_sums``.
    """

    statistics: tuple[tuple[int, bool], ...]
    uses: tuple[tuple[int, int], ...]
    sums: Sums = ()

    @staticmethod
    def of(program: FlatProgram, flow: SampleFlow) -> WholeBatch:
        """The statistics of the whole batch that a program reads."""
        position = {node: i for i, node in enumerate(program.calls)}
        numbers: dict[tuple[int, bool], int] = {}
        uses = []
        for use in flow.uses:
            key = position[use.argument], use.share
            uses.append((position[use.call], numbers.setdefault(key, len(numbers))))
        return WholeBatch(tuple(numbers), tuple(uses), batch_sums(program, flow))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that a batch has besides its own."""
        return tuple(f"statistic of the batch {i}" for i in range(len(self.statistics)))

    def put_in(self, program: FlatProgram) -> FlatProgram:
        """The program of a slice, which reads the statistics as tensors of the batch, and sums of
        the batch as rows.
        """
        calls = program.calls
        if not self.statistics:
            put_in_rows(program, calls, self.sums)
            return program
        statistics = self._made(program)
        sources = dict(program.sources)
        values: list[fx.Node] = []
        for number, (call, share) in enumerate(self.statistics):
            statistic = calls[call]
            like = statistic.meta["val"]
            dtype = torch.float64 if share else like.dtype
            with program.graph.inserting_before(calls[0]):
                rows = program.graph.placeholder(self.names[number].replace(" ", "_"))
            value = torch.empty_like(like, dtype=dtype, requires_grad=False)
            set_value(rows, value.new_empty((program.samples, *like.shape)))
            sources[rows] = PlaceholderSource(BATCH_LEAF, self.names[number])
            values.append(rows)
        for call, number in self.uses:
            reader = calls[call]
            index, share = self.statistics[number]
            if share:
                total = insert(reader, _aten.sum.dim_IntList, values[number], [0])
                read = insert(reader, _aten.to.dtype, total, reader.meta["val"].dtype)
            else:
                read = insert(reader, _aten.select.int, values[number], 0, 0)
            statistic = calls[index]
            for source in reader.all_input_nodes:
                # A number that was asked for (``item``) is the tensor that it is of.
                if source is statistic or (base_name(source), *source.args) == ("item", statistic):
                    reader.replace_input_with(source, read)
        sliced = replace(program, sources=sources, statistics=statistics)
        sliced.drop_dead()
        put_in_rows(sliced, calls, self.sums)
        return sliced

    def _made(self, program: FlatProgram) -> FlatProgram:
        """The part of a program that makes the statistics."""
        calls = program.calls
        wanted = [calls[index] for index, _ in self.statistics]
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in upstream(wanted):
            copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output(tuple(copied[node] for node in wanted))
        sources = {copied[n]: s for n, s in program.sources.items() if n in copied}
        return replace(program, graph=graph, sources=sources)

    def rows(self, values: list[Tensor], samples: int) -> dict[str, Tensor]:
        """The tensors of a batch with these statistics, one row per sample."""
        result = {}
        for name, value, (_, share) in zip(self.names, values, self.statistics, strict=True):
            row = value.double() / samples if share else value
            result[name] = row.expand(samples, *value.shape)
        return result
