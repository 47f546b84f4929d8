"""Calls in a forward that a trace would lose, traced another way or refused.

custom gradients        called as operators (``custom_functions``), or refused
checkpoints             plain calls, whose lines are noted
derivatives             calls of the program (``inner_gradients``), or refused
weight.data             ``weight.detach()``, the same memory: a trace makes a tensor without
                        values of ``.data``, so reading it fails far from the line, and a write
                        to it is dropped
hooks, transforms, packed sequences, seeds, frozen parameters, writes to ``.data``
                        refused, with the line and another way to write them
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import eager_transforms, vmap
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from anabranch.errors import CaptureError
from anabranch.graph.flat_program import storage, written
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing import patches
from anabranch.graph.tracing.custom_functions import operator_of
from anabranch.graph.tracing.empty_selections import traced_node
from anabranch.graph.tracing.inner_gradients import traced_gradients
from anabranch.graph.user_lines import user_frame

_FUNCTION = torch.autograd.function._SingleLevelFunction  # whose apply all others call
_TENSOR: Any = torch.Tensor
_AUTOGRAD: Any = torch.autograd
_RUN_BACKWARD = _AUTOGRAD._engine_run_backward
_DATA, _REQUIRES_GRAD = _TENSOR.data, _TENSOR.requires_grad


def _line() -> str:
    return user_frame(traceback.extract_stack())


def _refusal(because: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(f"{_line()} {because}")

    return refuse


_hook = _refusal(
    "has a hook on the gradient of a value (register_hook, or the backward hook of a module), "
    "which tracing loses, so that a pipeline would not call it: leave it out, put it on a "
    "parameter, or write an operator with a backward of its own (torch.library.custom_op, "
    "register_autograd)"
)

_differentiate = _refusal(
    "asks for a gradient inside the forward that cannot be traced, by backward(), or through calls "
    "that draw random numbers, as dropout does, change a buffer, as batch normalisation does, or "
    "are under autocast: call torch.autograd.grad, for values between which there are none of "
    "those, or take a penalty without a gradient, such as spectral normalisation"
)

_transform = _refusal(
    "transforms a function with torch.vmap or torch.func, inside of which tensors lack the "
    "dimension of the samples, so that they cannot be sent to another stage; write it for all "
    "samples at once: linear layers, matmul, einsum and broadcasting take further dimensions "
    "as they are, and torch.autograd.grad of a sum has the gradients of all samples"
)

_pack = _refusal(
    "packs sequences (pack_padded_sequence), whose operations differ with their lengths: give "
    "the layer the padded ones, and read its results where there is no padding (gather, a mask)"
)

_freeze = _refusal(
    "freezes or thaws parameters in the forward, which tracing loses: call the part with "
    "detached ones (torch.func.functional_call), or set requires_grad before the capture"
)

_seed = _refusal(
    "seeds random numbers, which a captured program does not, so each step would draw others: "
    "draw them once, in __init__, and keep them in a buffer"
)

_refuse_to_assign = _refusal(
    "assigns to the .data of a tensor, which tracing loses, other than new values of its shape to "
    "a parameter or buffer: keep the value in a buffer (register_buffer) and change that in place "
    "(copy_)"
)


def _gradients(
    outputs: Any, weights: Any, _: Any, create_graph: bool, inputs: Any, *__: Any, **options: Any
) -> Any:
    if get_proxy_mode() is None:
        raise NotImplementedError  # the error of an earlier trace names the line
    arguments = outputs, weights, inputs, create_graph
    gradients = None if options["accumulate_grad"] else traced_gradients(_RUN_BACKWARD, *arguments)
    return _differentiate() if gradients is None else gradients


@contextlib.contextmanager
def watched(checkpoints: set[str], *, are_traced: bool = True) -> Iterator[None]:
    """Trace or refuse the calls of this module inside of the context.

    Args:
        checkpoints: takes the user's lines that call ``torch.utils.checkpoint``.
        are_traced: whether custom gradients are called as operators.
    """
    plain = checkpoint._checkpoint_without_reentrant_generator

    def apply(cls: Any, *args: Any) -> Any:
        if (inputs := _recomputed(cls, *args)) is not None:
            checkpoints.add(_line())
            return args[0](*inputs)
        return _with_custom_gradient(cls, args, are_traced=are_traced)

    def without_reentrant(*args: Any, **kwargs: Any) -> Any:
        checkpoints.add(_line())
        return plain(*args, **kwargs)

    assigned: list[tuple[str, fx.Node]] = []
    replaced = [
        (torch.Tensor, "data", property(_read, partial(_assign, assigned=assigned))),
        (torch.Tensor, "requires_grad", property(_REQUIRES_GRAD.__get__, _require_gradient)),
        (torch.Tensor, "requires_grad_", _require_gradient),
        *((owner, "manual_seed", _seed) for owner in (torch, torch.random)),
        (_FUNCTION, "apply", classmethod(apply)),
        (checkpoint, "_checkpoint_without_reentrant_generator", without_reentrant),
        (torch.Tensor, "register_hook", _hook),
        (torch._VF, "_pack_padded_sequence", _pack),
        (torch.autograd, "_engine_run_backward", _gradients),
        (vmap, "vmap_increment_nesting", _transform),
        (eager_transforms, "grad_increment_nesting", _transform),
        (eager_transforms, "jvp_increment_nesting", _transform),
        # It looks at values, which a trace lacks, only to raise.
        (Distribution, "_validate_args", False),
    ]
    with with_attributes(replaced):
        yield
    uses = {graph: _Uses(graph) for graph in {copied.graph for _, copied in assigned}}
    for line, copied in assigned:
        if _is_shared(copied, uses[copied.graph]):
            raise CaptureError(
                f"{line} assigns to the .data of a tensor whose old values are read afterwards, or "
                "whose new values are changed afterwards: change the tensor in place (copy_), and "
                "clone what is to stay as it is"
            )


def _recomputed(
    cls: Any, run: Any = None, option: Any = None, *inputs: Any
) -> tuple[Any, ...] | None:
    """Return the inputs of the function that a checkpoint runs; None for other custom gradients.

    Copies of PyTorch's have its arguments; in diffusion models the number of inputs stands in place
    of the flag, and parameters follow the inputs.
    """
    count = len(inputs) if isinstance(option, bool) else option
    is_checkpoint = cls.__name__ == checkpoint.CheckpointFunction.__name__ and callable(run)
    if not (is_checkpoint and isinstance(count, int) and 0 <= count <= len(inputs)):
        return None
    only_parameters = all(isinstance(value, nn.Parameter) for value in inputs[count:])
    return inputs[:count] if only_parameters else None


def _with_custom_gradient(cls: Any, args: tuple[Any, ...], *, are_traced: bool) -> Any:
    if cls is BackwardHookFunction:
        _hook()
    plain_apply = super(_FUNCTION, cls).apply
    if cls.__module__.startswith("torch."):  # such as that of a torch.library operator
        return plain_apply(*args)
    if are_traced and (operator := operator_of(cls, args, plain_apply)):
        return operator(*args)
    if not are_traced:
        raise NotImplementedError  # the error of an earlier trace names the line
    raise CaptureError(
        f"{_line()} calls {cls.__name__}.apply, an autograd.Function that takes or returns more "
        "than tensors and numbers, changes them in place, needs their values or draws random "
        "numbers: tracing sees its forward only, and its backward would silently be replaced by "
        "that of the forward's operations; write it with tensor operations, or as "
        "torch.library.custom_op with register_autograd (random numbers as an argument)"
    )


def _read(tensor: Any) -> Any:
    is_torchs = patches.is_in_torch(sys._getframe(1))
    return _DATA.__get__(tensor) if is_torchs else tensor.detach()


def _assign(tensor: Any, value: Any, *, assigned: list[tuple[str, fx.Node]]) -> None:
    """Assign to ``.data``: new values of a tensor of the module are copied into it, which is noted
    with the line.
    """
    if patches.is_in_torch(sys._getframe(1)):
        _DATA.__set__(tensor, value)
        return
    if get_proxy_mode() is None:
        raise NotImplementedError  # the error of an earlier trace names the line
    is_alike = (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
    if not is_alike or not _is_own(tensor) or _is_own(value):
        _refuse_to_assign()
    with torch.no_grad():
        tensor.detach().copy_(value)
    source = traced_node(value)
    assert source is not None
    copies = source.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assigned.append((_line(), copies[-1]))


def _is_shared(copied: fx.Node, uses: _Uses) -> bool:
    """Return True if a copy in place of an assignment may be seen: old values are read afterwards,
    by another name, or memory is changed that both have after the assignment.
    """
    own, new = map(storage, copied.all_input_nodes)
    at = uses.position[copied]
    changed = [uses.last_write.get(memory, 0) > at for memory in (own, new)]
    is_old_read = any(
        uses.position[node] < at < uses.last_read.get(node, 0)
        for node in uses.names[own]
        if node.op != "placeholder"
    )
    is_new_read = any(uses.last_read.get(node, 0) > at for node in uses.names[new])
    return is_old_read or changed[1] or (changed[0] and is_new_read)


class _Uses:
    """Nodes of a graph by the memory of their values, and where each is read and written last."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.names: dict[int | None, list[fx.Node]] = defaultdict(list)
        self.last_read: dict[fx.Node, int] = {}
        self.last_write: dict[int | None, int] = {}
        for node, i in self.position.items():
            self.names[storage(node)].append(node)
            self.last_read.update(dict.fromkeys(node.all_input_nodes, i))
            self.last_write.update((storage(target), i) for target in written(node))


def _is_own(tensor: torch.Tensor) -> bool:
    """True for a traced parameter, buffer or tensor of the batch, or a view of one."""
    node = traced_node(tensor)
    return node is None or storage(node) in map(storage, node.graph.find_nodes(op="placeholder"))


def _require_gradient(tensor: Any, value: bool = True) -> Any:
    if value != _REQUIRES_GRAD.__get__(tensor):  # which a result of calls may say again
        if isinstance(tensor, nn.Parameter):
            _freeze()
        _REQUIRES_GRAD.__set__(tensor, value)
    return tensor
