"""Patches of PyTorch while a forward is traced.

Checks of the data that do nothing but raise are left out (``without_raising_guards``), what is
computed without gradients is detached (``NoGradDetached``). ``library_rules`` has those of code
that tracing cannot follow.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anabranch.graph.call_traits import value_inputs
from anabranch.graph.flat_program import is_random, storage, written
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing.empty_selections import EmptySelections, traced_node
from anabranch.graph.tracing.source_questions import passing_truth
from anabranch.graph.user_lines import TORCH, forward_trace, frame_place

_KERNELS = tuple(TORCH + name for name in ("_refs", "_decomp", "_meta_registrations"))
"""PyTorch's own operations in Python, which ask for the special case of no entries."""

_TRACING = threading.RLock()
# A child has no other thread that would let go of it and undo the patches.
os.register_at_fork(
    before=_TRACING.acquire, after_in_parent=_TRACING.release, after_in_child=_TRACING.release
)

_COLLECT_AFTER = 20_000
"""Objects that a trace makes between two searches for cycles. Nearly all of them stay alive: by
Python's default such searches take 6 to 12 % of a capture, and save 1 % of its memory."""


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """Context manager that lets one thread trace at a time, as patches hold for all threads, and
    makes Python's searches for cycles of garbage rare, if there are any.
    """
    with _TRACING:
        least, *others = gc.get_threshold()
        gc.set_threshold(max(least, _COLLECT_AFTER) if least else 0, *others)
        try:
            yield
        finally:
            gc.set_threshold(least, *others)


@contextlib.contextmanager
def without_raising_guards(
    left_out: set[str],
    selections: EmptySelections,
    state: Sequence[torch.Tensor | None] = (),
    asked: set[int] | None = None,
) -> Iterator[None]:
    """Context manager under which traced forwards pass checks that only raise; ``left_out`` gets
    file and line of each. Work that is left out on empty ``selections`` is traced. ``state`` has
    the values of the first inputs of the trace, where they are known; ``asked`` gets the positions
    of those that decide.

    ``if labels.max() >= 10: raise`` needs the value of a tensor in Python, so it has no graph; but
    only one of its branches goes on. The truth of a tensor in such a check is what lets the forward
    go on, found in the source line that asks::

        if not x.isfinite().all():      the branch raises     ->  the test is false, so what is
            raise ValueError                                      inside of ``not`` is true
        assert (a < b).all()                                  ->  the test is true

    A test that chooses between two ways to go on is left alone: the operations would differ from
    batch to batch. Only where it depends on nothing but sizes (``positions.diff().ne(1).any()`` of
    an ``arange``), buffers (``if self.is_initialized:``) and constants is its truth known.

    A number that a tensor is asked for (``item``) is compared as a symbol, whose truth is asked.
    """
    tensors: Any = torch.Tensor
    symbols: Any = torch.SymBool
    number_truth = torch.SymInt.__bool__.__code__

    def truth(frame: FrameType, value: Any) -> bool | None:
        passing = passing_truth(frame)
        if passing is None:
            chosen = _constant_truth(value, state, asked)
            return selections.truth(frame, value) if chosen is None else chosen
        left_out.add(frame_place(frame))
        return passing

    def truth_of_tensor(tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            chosen, frame = _constant_truth(tensor), sys._getframe(1)
            if chosen is None:
                chosen = truth(frame, tensor)
            if chosen is not None:
                return chosen
        return bool(tensor_truth(tensor))

    def truth_of_symbol(symbol: torch.SymBool) -> bool:
        chosen, frame = None, sys._getframe(1)
        if frame.f_code is number_truth:  # of rows.numel() without a comparison
            frame = sys._getframe(2)
        if _depends_on_data(symbol):
            if not is_in_torch(frame):
                chosen = truth(frame, symbol)
            elif frame.f_code.co_filename.startswith(_KERNELS):
                chosen = guard_or_false(symbol)
        return bool(symbol_truth(symbol)) if chosen is None else chosen

    def entries(tensor: torch.Tensor) -> Iterator[Any]:
        hits = None
        if isinstance(tensor, FakeTensor):
            hits = selections.hits(sys._getframe(1), tensor)
        return plain_entries(tensor) if hits is None else hits

    def length(tensor: torch.Tensor) -> int:
        one = None
        if isinstance(tensor, FakeTensor) and not is_in_torch(sys._getframe(1)):
            one = selections.length(sys._getframe(1), tensor)
        return int(plain_length(tensor)) if one is None else one

    def text(tensor: torch.Tensor, form: str) -> str:
        constant = getattr(tensor, "constant", None)  # of a tensor that is traced
        return str(plain_text(tensor if constant is None else constant, form))

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = plain_node(tracer, *args, **kwargs)
        frame = sys._getframe(1)
        node.stack_trace = node.stack_trace or forward_trace(frame)
        selections.note(node, frame)
        return node

    truths = [
        (tensors, "__format__", text),
        (tensors, "__len__", length),
        (tensors, "__bool__", truth_of_tensor),
        (symbols, "__bool__", truth_of_symbol),
        (tensors, "__iter__", entries),
        (fx.Tracer, "create_node", create_node),
        # All frames of each call, with their source lines, would be a tenth of a capture.
        (fx.config, "do_not_emit_stack_traces", True),
    ]
    with _TRACING:  # the truth of a tensor is that of all threads
        tensor_truth, symbol_truth = tensors.__bool__, symbols.__bool__
        plain_entries, plain_length = tensors.__iter__, tensors.__len__
        plain_text = tensors.__format__
        plain_node = fx.Tracer.create_node
        try:
            with with_attributes(truths):
                yield
        finally:
            selections.forget()


def is_in_torch(frame: FrameType) -> bool:
    """Return True for code of PyTorch's own."""
    return frame.f_code.co_filename.startswith(TORCH)


def _depends_on_data(symbol: Any) -> bool:
    """Return True for a symbol whose number the tracer does not know."""
    free = getattr(symbol.node.expr, "free_symbols", ())
    return any(str(name).startswith(("u", "zuf", "zf")) for name in free)


def _is_batch_size(node: fx.Node) -> bool:
    """True for a size that is known from the batch's, not one of values that a mask has chosen."""
    is_size = node.target is torch.ops.aten.sym_size.int
    return is_size and not _depends_on_data(node.meta["val"])


def _constant_calls(
    value: torch.Tensor | torch.SymBool,
    known: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}),
) -> list[fx.Node] | None:
    """Return the calls that make a traced value of constants, sizes and ``known`` inputs alone, in
    order; None if it depends on another input or on random numbers, or is written to.
    """
    if (traced := traced_node(value)) is None:
        return None
    reached, pending = {traced}, [traced]
    while pending:
        node = pending.pop()
        if node in known or _is_batch_size(node):
            continue
        if node.op != "call_function" or is_random(node.target):
            return None
        pending += [source for source in value_inputs(node) if source not in reached]
        reached.update(value_inputs(node))
    nodes = list(traced.graph.nodes)
    storages = {storage(node) for node in reached} - {None}
    if any(storage(target) in storages for node in nodes for target in written(node)):
        return None
    return [node for node in nodes if node in reached]


def _constant_truth(
    value: torch.Tensor | torch.SymBool,
    state: Sequence[torch.Tensor | None] = (),
    asked: set[int] | None = None,
) -> bool | None:
    """Return the truth of a traced value that is the same for any batch, None for others. ``asked``
    gets the positions of the inputs that it follows from, among those with a known ``state``.
    """
    if (traced := traced_node(value)) is None:
        return None
    mode: Any = get_proxy_mode()
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    held = dict(zip(inputs, state, strict=False))
    constants = [node for node in traced.graph.nodes if node.op == "get_attr"]
    held.update((node, getattr(mode.tracer.root, str(node.target))) for node in constants)
    known = {n: t for n, t in held.items() if type(t) is torch.Tensor and not t.is_meta}
    if (calls := _constant_calls(value, known)) is None:
        return None
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        once, twice = (bool(_computed(calls, known, times)) for times in (1, 2))
    if asked is not None:
        asked.update(i for i, node in enumerate(inputs) if node in calls)
    return once if once == twice else None


def _computed(
    calls: list[fx.Node], known: Mapping[fx.Node, torch.Tensor], times: int
) -> torch.Tensor:
    """Compute the value of the last call for so many times the samples."""
    values: dict[fx.Node, Any] = {}
    for node in calls:
        call: Any = node.target
        if node in known:
            values[node] = known[node].cpu()
        elif _is_batch_size(node):
            values[node] = times * node.meta["val"].node.hint
        else:
            operands = fx.map_arg(
                (node.args, node.kwargs),
                lambda read: values[read] if read in values else _alike(read.meta["val"], times),
            )
            # A meta device has no values, and a GPU may not be here.
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), operands)
            values[node] = call(*args, **kwargs)
    result: torch.Tensor = values[calls[-1]]
    return result


def _alike(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """Return a tensor of that type for so many times the samples, of which no entry is read."""
    sizes = [times * n.node.hint if isinstance(n, torch.SymInt) else n for n in tensor.shape]
    return torch.empty(sizes, dtype=tensor.dtype)


def depends_on_batch(tensor: torch.Tensor | None = None) -> bool:
    """Return True for a traced tensor whose values follow from the batch."""
    return isinstance(tensor, FakeTensor) and _constant_calls(tensor) is None


class NoGradDetached(TorchFunctionMode):
    """Mode that detaches results without a gradient of arguments that have one: an exported program
    forgets ``no_grad`` in a region of ``torch.autocast``, also where that is disabled.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.requires_grad for tensor in read):
            return result
        return tree_map_only(
            torch.Tensor, lambda value: value if value.requires_grad else value.detach(), result
        )
