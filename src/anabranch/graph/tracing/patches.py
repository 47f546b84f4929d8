"""Patches of PyTorch and of libraries while a forward is traced.

Checks of the data that do nothing but raise are left out (``without_raising_guards``), what is
computed without gradients is detached (``NoGradDetached``), and library code that tracing cannot
follow is replaced by code with the same values (``library_rules``, and ``multimodal`` for its own
models).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anabranch.device.kinds import CPU
from anabranch.graph.call_traits import value_inputs
from anabranch.graph.flat_program import is_random, storage, written
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing.adaptive_softmax import without_questions
from anabranch.graph.tracing.ctc_loss import traceable
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


def _broadcast(masking: Any) -> Callable[..., Any]:
    """``torch.vmap`` over the four dimensions of a mask is broadcasting, where the mask's function
    works on whatever indices it is given, as those of transformers do.
    """

    def expansion(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *indices: mask_function(*masking._non_vmap_expansion_sdpa(*indices))

    return expansion


def _masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values[mask]``, of which the tracer knows that one mask always chooses as many."""
    shape = torch.broadcast_shapes(values.shape, mask.shape)  # type: ignore[no-untyped-call]
    values = values if values.shape == shape else values.expand(shape)
    return values[mask if mask.shape == shape else mask.expand(shape)]


def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """``bincount`` of classes that are counted; a batch with a larger entry fails at the view."""
    counts = torch.ops.aten.bincount(input, weights, minlength)
    return counts.view(minlength) if minlength > 1 else counts


def _contiguous(tensor: Any, memory_format: Any = torch.contiguous_format) -> Any:
    """``contiguous``, a call of what is so already too, as ``h0.expand(1, n, d)`` of one sample."""
    return torch.ops.aten.contiguous(tensor, memory_format=memory_format)


def _unless_moved(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``Module.to`` and the like, without writes where all tensors have that device and type."""

    def applied(self: nn.Module, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with disable_proxy_modes_tracing():
            tensors = [*self.parameters(), *self.buffers()]
            if all(change(tensor) is tensor for tensor in tensors):
                return self
        return apply(self, change, *args, **kwargs)

    return applied


def _on_real_device(construct: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast`` of the device type of a tensor on the meta device, which has none."""

    def constructed(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        kind = CPU if device_type == "meta" else device_type
        construct(self, kind, *args, **kwargs)

    return constructed


def _depends_on_batch(tensor: torch.Tensor | None = None) -> bool:
    return isinstance(tensor, FakeTensor) and _constant_calls(tensor) is None


def _never(_: Any) -> Callable[[], bool]:
    return lambda: False


def _causal_if_known(transformer: Any) -> Callable[..., bool]:
    """True for the causal mask, for which ``nn.Transformer`` takes a faster kernel; False for one
    in a buffer, whose values a trace does not know: the kernel for any mask is right as well.
    """

    detect: Callable[..., bool] = transformer._detect_is_causal_mask

    def detected(mask: torch.Tensor | None, is_causal: bool | None, *size: Any) -> bool:
        if _depends_on_batch(mask):
            return is_causal is True
        if mask is None or isinstance(mask, FakeTensor):
            return detect(mask, is_causal, *size)
        with unset_fake_temporarily(), disable_proxy_modes_tracing():  # kept in an attribute
            return detect(mask, is_causal, *size)

    return detected


_RULES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # Gemma3: masks that let the tokens of one image see each other.
    ("transformers.masking_utils", "_vmap_expansion_sdpa", _broadcast),
    ("transformers.masking_utils", "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
    # Masks that a call without tracing does without, as no value of the batch is in them.
    ("transformers.masking_utils", "is_torchdynamo_exporting", _never),
    ("transformers.masking_utils", "is_tracing", lambda _: _depends_on_batch),
    # Encoders that make a mask where none is given, and need it, but not while they are compiled.
    *(
        (f"transformers.models.{name}.modeling_{name}", "is_torchdynamo_compiling", _never)
        for name in ("longt5", "pop2piano", "switch_transformers", "udop")
    ),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", _causal_if_known),
    ("torch.nn.functional", "ctc_loss", lambda functional: traceable(functional.ctc_loss)),
    # Order in memory of every value, which nobody reads and symbolic sizes take long to tell.
    ("torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", lambda _: lambda _: None),
)
"""Module, a name in it, and the module -> what the name stands for while a forward is traced."""


def library_rules(*, dynamic: bool = True) -> contextlib.AbstractContextManager[None]:
    """Context manager that puts code with the same values in place of library code that cannot be
    traced. Without ``dynamic``, a trace for one number of samples makes the calls of others.
    """
    loaded = [(sys.modules.get(name), key, make) for name, key, make in _RULES]
    # Other versions of a library may not have a name.
    rules: list[tuple[Any, str, Any]] = [
        (owner, key, make(owner)) for owner, key, make in loaded if hasattr(owner, key)
    ]
    for name, call in (("masked_select", _masked_select), ("bincount", _bincount)):
        rules += [(owner, name, call) for owner in (torch, torch.Tensor)]
    rules += [] if dynamic else [(torch.Tensor, "contiguous", _contiguous)]
    # transformers' own, which leaves no trace of a region that is disabled where none is around it.
    name = "maybe_autocast"
    if theirs := getattr(sys.modules.get("transformers.utils.generic"), name, None):
        modules = [*sys.modules.values()]  # some are None: those whose import is blocked
        asking = [m for m in modules if getattr(m, "__dict__", {}).get(name) is theirs]
        rules += [(module, name, torch.autocast) for module in asking]
    changed = (
        (torch.autocast, "__init__", _on_real_device),
        (nn.Module, "_apply", _unless_moved),
        (nn.AdaptiveLogSoftmaxWithLoss, "forward", without_questions),
    )
    rules += [(owner, key, make(getattr(owner, key))) for owner, key, make in changed]
    return with_attributes(rules)
