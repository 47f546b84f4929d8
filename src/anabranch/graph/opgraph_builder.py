"""The graph of operators of a grouped program, with parameters and the values between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from torch import Tensor, fx, nn

from anabranch.graph import flat_program
from anabranch.graph.call_traits import CallTraits, SampleAxis, arguments, base_name, tensor
from anabranch.graph.group import FREE, Grouping
from anabranch.graph.operations import LOOKUPS
from anabranch.graph.opgraph import BATCH, LookupTable, Op, OpGraph, Parameter, Value
from anabranch.graph.slices import in_slices, view_named
from anabranch.graph.tracing.changed_state import changed_state


def build(
    module: nn.Module,
    traits: CallTraits,
    grouping: Grouping,
    training: bool,
    coupled: Collection[str] = (),
) -> tuple[OpGraph, tuple[int, ...], dict[int, SampleAxis]]:
    """Return the graph of operators, the position of each value's call, and position -> samples.

    Args:
        coupled: names of operators that are right for the whole batch only.
    """
    program = traits.program
    owners = grouping.owner_of(program)
    readers = _readers(program, owners)
    carriers = flat_program.gradient_calls(program) if training else set()
    read: list[set[str]] = [set() for _ in grouping.names]
    batch_values, values, axes = [], [], {-1: SampleAxis(0)}
    for node in program.graph.nodes:
        source = program.sources.get(node)
        if source is not None and source.kind == "parameter":
            for op in readers[node]:
                read[op].add(source.name)
        elif source is not None and source.kind == "batch":
            size = node.meta["val"].nbytes // program.samples
            consumers = tuple(sorted(readers[node]))
            batch_values.append((Value(BATCH, consumers, size, True, False, source.name), -1))
        elif node.op == "call_function" and owners[node] != FREE:
            consumers = tuple(sorted(readers[node] - {owners[node]}))
            if consumers:
                grad = flat_program.requires_grad(node) and any(
                    user in carriers and owners[user] != owners[node] for user in node.users
                )
                axis, nbytes = traits.axis(node), node.meta["val"].nbytes
                call = traits.position[node]
                if axis is not None:
                    axes[call], nbytes = axis, nbytes // program.samples
                value = Value(owners[node], consumers, nbytes, axis is not None, grad, node.name)
                values.append((value, call))
    used = set[str]().union(*read)
    wholes: dict[str, Tensor] = dict(module.named_parameters())
    parameters = in_slices(wholes, used, view_named)
    ops = []
    for i, (name, kind) in enumerate(zip(grouping.names, grouping.kinds, strict=True)):
        ordered = tuple(n for n in parameters if n in read[i])
        ops.append(Op(name, ordered, kind, whole_batch=name in coupled))
    looked_up = tables(traits)
    held = tuple(
        Parameter(n, p.nbytes, p.requires_grad, looked_up.get(n))
        for n, p in parameters.items()
        if n in used
    )
    entries = [*batch_values, *values]
    owned = ((call, owner) for call, owner in owners.items() if owner != FREE)
    whole = {call for call, owner in owned if grouping.names[owner] in coupled}
    graph = OpGraph(
        tuple(ops),
        tuple(e[0] for e in entries),
        held,
        type(module).__name__,
        stateful=changed_state(program, whole) if training else (),
    )
    return graph, tuple(e[1] for e in entries), axes


def _readers(
    program: flat_program.FlatProgram, owners: Mapping[fx.Node, int]
) -> dict[fx.Node, set[int]]:
    """Return node -> operators that read it, directly or through calls that are copied to them."""
    readers: dict[fx.Node, set[int]] = defaultdict(set)
    for node in reversed(list(program.graph.nodes)):
        if node.op != "call_function":
            continue
        owners_of_node = readers[node] if owners[node] == FREE else {owners[node]}
        for source in node.all_input_nodes:
            readers[source] |= owners_of_node
    return readers


def tables(traits: CallTraits) -> Mapping[str, LookupTable]:
    """Return parameters of which nothing is read but rows that the batch names, so that only these
    have gradients; sparse ones where ``nn.Embedding`` asks for them (``sparse=True``).
    """
    tables_by_name = {}
    for node, source in traits.program.sources.items():
        weight = tensor(node)
        if source.kind != "parameter" or weight is None or weight.dim() != 2:
            continue
        lookups = [_lookups(user, node, traits) for user in node.users]
        if lookups and all(lookups):
            row_bytes = weight.shape[1] * weight.element_size()
            declared = all(arguments(user)["sparse"] for user in node.users)
            tables_by_name[source.name] = LookupTable(sum(lookups), row_bytes, declared)
    return tables_by_name


def _lookups(call: fx.Node, weight: fx.Node, traits: CallTraits) -> int:
    """Return the rows that a call looks up per sample; 0 if it is no lookup by the batch."""
    if not _may_be_sparse(call) or call.all_input_nodes.count(weight) != 1:
        return 0
    options, twins = arguments(call), arguments(traits.twins[call])
    if options["weight"] is not weight:
        return 0
    few, many = (call["indices"].meta["val"].numel() for call in (options, twins))
    rows, samples = many - few, traits.sizes[1] - traits.sizes[0]
    is_by_sample = rows > 0 and rows * traits.sizes[0] == few * samples
    return int(rows // samples) if is_by_sample else 0


def _may_be_sparse(call: fx.Node) -> bool:
    if call.op != "call_function" or base_name(call) not in LOOKUPS:
        return False
    options = arguments(call)
    if options["scale_grad_by_freq"] or options.get("per_sample_weights") is not None:
        return False
    return options.get("mode") in (None, 0, 1)  # a bag's sum or mean, not its maximum


def make_sparse(graph: fx.Graph) -> int:
    """Make lookups give sparse gradients, in place; return the number of calls changed."""
    count = 0
    for call in graph.nodes:
        if _may_be_sparse(call) and not arguments(call)["sparse"]:
            call.args = tuple((arguments(call) | {"sparse": True}).values())
            call.kwargs = {}
            count += 1
    return count
