"""Statistics of a whole batch, put into the programs of its slices.

A loss that is divided by a count of the batch's labels is that of the batch only if every slice
divides by the count of the batch. Counts depend on nothing that is learned, so they are known
before the forward begins, and enter as tensors of the batch with one row per sample::

    loss = sum(entries of the slice) / count of the slice
                                                         row of a sample: count of the batch / n
    loss = sum(entries of the slice) / sum(rows of the slice)

A slice's share of the count is that of its samples, so the loss of the batch stays the mean over
samples of those of its slices. Where all labels count, nothing changes, not in one bit.

A term without samples beside a sum, such as a penalty on weights, is weighed by the slice's share
of 1, with rows ``1 / n``, so that all slices together add it once.

All other values that are known before the forward, and differ in a slice, enter in the same way: a
number that follows from the number of samples, ``1 / len(x)``, and a value with samples, such as
``x.softmax(0)``, of which each sample has its own row.

A router's auxiliary loss multiplies two sums over all tokens of a batch, so it is right for the
whole batch only. The summed values are made in the layers, and a sum has no samples that could be
cut: by itself, the loss and all layers before it would be one operator. So such a sum gets one row
per sample, and its readers for the whole batch have the rows of all slices::

    slice         p = probabilities.sum(0)        rows = [p, 0, 0, ...]    or, of a mean, [p, p, p]
    whole batch   p = rows.sum(0)                                          rows.mean(0)
                  loss = (f * p).sum() + ...

Calls that compute from rows are an operator of their own (``WHOLE_BATCH_LOSS``), and the layers
keep their micro-batches and replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from anabranch.graph.call_traits import arguments, base_name, inputs_of, tensor, with_tensor
from anabranch.graph.flat_program import (
    APART,
    FlatProgram,
    PlaceholderSource,
    insert,
    set_value,
    upstream,
    written,
)
from anabranch.graph.operations import COUNTS
from anabranch.graph.samples.flows import SampleFlow, Statistic, above

WHOLE_BATCH_LOSS = "whole_batch_loss"
"""Path of the calls that read rows, and the name of their operator."""

_FOLDED_NUMEL = 4096
"""Most numbers of a sum that are sent per sample if the summed values cannot be; bounds experts."""

_aten = torch.ops.aten
Sums = tuple[tuple[int, bool], ...]


def batch_sums(program: FlatProgram, flow: SampleFlow) -> Sums:
    """Return sums that a coupled loss reads: position of the call, and whether it is a mean."""
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
        (position, flow.flows[node].kind == "mean")
        for position, node in enumerate(program.calls)
        if node in led_to
        and node in without_samples
        and _is_sum(node, flow)
        and _is_small(node, program, flow)
        and not any(node in written(user) for user in node.users if len(node.users) > 1)
    )


def _is_sum(node: fx.Node, flow: SampleFlow) -> bool:
    """Return True for a sum or a mean of values with samples, a count included."""
    result = flow.flows[node]
    is_count = result.counts and base_name(node).rstrip("_") in COUNTS | {"sum"}
    of_samples = any(flow.flows[source].kind == "samples" for source in node.all_input_nodes)
    is_sum = result.kind in ("sum", "mean") or is_count
    return is_sum and of_samples and tensor(node) is not None


def _is_small(node: fx.Node, program: FlatProgram, flow: SampleFlow) -> bool:
    """Return True if rows of a sum take less than the summed values, if these can be sent."""
    value = tensor(node)
    assert value is not None
    values = [tensor(n) for n in node.all_input_nodes if flow.flows[n].kind == "samples"]
    inputs = [x for x in values if x is not None]
    # Values that a mask selects have a size that depends on the data.
    sized = [x for x in inputs if all(isinstance(size, int) for size in x.shape)]
    sent = [x.numel() // program.samples for x in sized]
    folded = len(sized) < len(inputs) or any(program.samples not in x.shape for x in sized)
    return value.numel() <= max([*sent, _FOLDED_NUMEL if folded else 0])


def put_in_rows(program: FlatProgram, calls: list[fx.Node], sums: Sums) -> None:
    """Make readers of sums compute them from rows, in place; ``sums``: positions in ``calls``."""
    behind = dict[fx.Node, None]()
    for position, is_mean in sums:
        value = calls[position]
        readers = [user for user in program.calls if value in user.all_input_nodes]
        ones = [1] * value.meta["val"].dim()
        if is_mean:
            sizes = [program.samples, *ones]
            rows = insert(readers[0], _aten.repeat.default, value, sizes, origin=value)
            total = insert(readers[0], _aten.mean.dim, rows, [0])
        else:
            row = insert(readers[0], _aten.unsqueeze.default, value, 0, origin=value)
            padding = [0, 0] * len(ones) + [0, program.samples - 1]
            rows = insert(readers[0], _aten.constant_pad_nd.default, row, padding, origin=value)
            dtype = rows.meta["val"].dtype
            total = insert(readers[0], _aten.sum.dim_IntList, rows, [0], dtype=dtype)
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


@dataclass(frozen=True)
class WholeBatch:
    """Calls that read statistics, by positions in the program, equal for any number of samples.

    Attributes:
        statistics: values that slices need of the whole batch.
        uses: (position of the reading node, number of the statistic).
        sums: calls whose values reach a coupled loss as rows, see ``batch_sums``.
    """

    statistics: tuple[Statistic, ...]
    uses: tuple[tuple[int, int], ...]
    sums: Sums = ()

    @staticmethod
    def of(program: FlatProgram, flow: SampleFlow) -> WholeBatch:
        """Return the statistics of the whole batch that a program reads."""
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        statistics = tuple(dict.fromkeys(statistic for _, statistic in flow.uses))
        uses = ((position[call], statistics.index(statistic)) for call, statistic in flow.uses)
        return WholeBatch(statistics, tuple(uses), batch_sums(program, flow))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors of statistics, which a batch has besides its own tensors."""
        return tuple(f"statistic of the batch {i}" for i in range(len(self.statistics)))

    def put_in(self, program: FlatProgram) -> FlatProgram:
        """Return the program of a slice, with statistics as tensors of the batch, sums as rows."""
        calls, nodes = program.calls, list(program.graph.nodes)
        values = [_value(nodes, calls[0], statistic) for statistic in self.statistics]
        statistics = _made(program, values) if values else None
        sources = dict(program.sources)
        rows: list[fx.Node] = []
        for name, value, statistic in zip(self.names, values, self.statistics, strict=True):
            with program.graph.inserting_before(calls[0]):
                rows.append(program.graph.placeholder(name.replace(" ", "_")))
            like = _as_rows(value.meta["val"].detach(), statistic, program.samples)
            set_value(rows[-1], torch.empty_like(like))
            sources[rows[-1]] = PlaceholderSource("batch", name)
        for position, number in self.uses:
            reader, statistic = nodes[position], self.statistics[number]
            if statistic.axis is not None:
                dim = statistic.axis.dim
                moved = insert(reader, _aten.movedim.int, rows[number], 0, dim + 1)
                read = insert(reader, _aten.flatten.using_ints, moved, dim, dim + 2)
            elif statistic.share or statistic.weighs:
                read = insert(reader, _aten.sum.dim_IntList, rows[number], [0])
                read = insert(reader, _aten.to.dtype, read, reader.meta["val"].dtype)
            else:
                read = insert(reader, _aten.select.int, rows[number], 0, 0)
            if statistic.weighs:
                term = arguments(reader)[statistic.argument]
                reader.replace_input_with(term, insert(reader, _aten.mul.Tensor, term, read))
            elif statistic.argument:
                _set_number(reader, statistic.argument, read)
            else:
                reader.replace_input_with(values[number], read)
        sliced = replace(program, sources=sources, statistics=statistics)
        sliced.drop_dead()
        put_in_rows(sliced, calls, self.sums)
        return sliced

    def rows(self, values: list[Tensor], samples: int) -> dict[str, Tensor]:
        """Return tensors of a batch for these statistics, one row per sample."""
        triples = zip(self.names, values, self.statistics, strict=True)
        return {name: _as_rows(value, kind, samples) for name, value, kind in triples}


def _as_rows(value: Tensor, statistic: Statistic, samples: int) -> Tensor:
    """Return a statistic as rows ``[n, ...]``; if folded, ``[n, ..., outer, inner, ...]``."""
    if (axis := statistic.axis) is not None:
        sizes = axis.parts(value.shape, samples)
        return torch.unflatten(value, axis.dim, sizes).movedim(axis.dim + 1, 0)
    row = value.double() / samples if statistic.share or statistic.weighs else value
    return row.expand(samples, *value.shape)


def _made(program: FlatProgram, wanted: list[fx.Node]) -> FlatProgram:
    """Return the part of a program that makes some values."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in upstream(wanted):
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in wanted))
    sources = {copied[n]: s for n, s in program.sources.items() if n in copied}
    return replace(program, graph=graph, sources=sources)


def _value(nodes: list[fx.Node], first: fx.Node, statistic: Statistic) -> fx.Node:
    """Return the node of a statistic of a program, inserted for a number; ``first``: its call."""
    if statistic.weighs:
        return insert(first, _aten.scalar_tensor.default, 1.0, device=first.meta["val"].device)
    node = nodes[statistic.position]
    return _number(node, statistic.argument) if statistic.argument else node


def _number(call: fx.Node, argument: str) -> fx.Node:
    """Insert a tensor of a number among the arguments of a call, before the call."""
    number, value = arguments(call)[argument], call.meta["val"]
    kind = number.meta["val"] if isinstance(number, fx.Node) else number
    dtype = torch.int64 if isinstance(kind, int | torch.SymInt) else torch.float64
    options = {"dtype": dtype, "device": value.device}
    with call.graph.inserting_before(call):
        node = call.graph.call_function(_aten.scalar_tensor.default, (number,), options)
    set_value(node, value.new_empty((), **options))
    return node


def _set_number(call: fx.Node, argument: str, number: fx.Node) -> None:
    """Put a tensor in place of a number of a call; the call's value has the same type."""
    value = call.meta["val"]
    dtype = value.dtype
    # A tensor without dimensions is read as exactly as a number is.
    if value.dim() and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    if dtype is not torch.bool:
        number = insert(call, _aten.to.dtype, number, dtype)
    options, target = arguments(call), with_tensor(call, argument)
    call.target, (call.args, call.kwargs) = target, inputs_of(target, options | {argument: number})
