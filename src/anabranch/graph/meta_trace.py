"""Flat programs of a module on the meta device, traced directly for a number of samples.

Planning needs no more than shapes, so a module without values runs as it is, on meta tensors, and
every call is written down before PyTorch takes it apart. A capture takes a tenth of the time that
it takes with ``torch.export`` and a symbol for the samples (two-branch .24 s of 2.7, mmt .32 of
4.5), and the result is equal for plain tensor code.
Whatever else happens (gradients switched off, autocast, tensors from nowhere, values that are
needed, slices that depend on the symbol, modules of several names, attributes that the forward
sets) raises ``NotPlainError``, and the module is exported.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from anabranch.graph.flat_program import FlatProgram, PlaceholderSource, ProgramBuilder
from anabranch.graph.meta_kernels import KnownResults, MetaKernels


class NotPlainError(Exception):
    """The module does something that a plain trace would lose."""


def trace_on_meta(
    wrapped: nn.Module,
    leaves: Sequence[torch.Tensor],
    samples: int,
    sources: Mapping[PlaceholderSource, torch.Tensor],
    known: MetaKernels,
) -> tuple[FlatProgram, tuple[str, ...]]:
    """The flat program of a module, with values, and the names of what it returns.

    Args:
        wrapped: returns a dict of scalars, ``loss`` first.
        leaves: of the batch, on the meta device.
        sources: parameters, buffers and the leaves, in order.
        known: what operations returned in earlier traces.

    Raises:
        NotPlainError: if the module has to be exported; also for any error of its own, and where
            PyTorch's private parts are not those of this one.
    """
    paths: dict[int, str] = {}
    for name, part in wrapped.named_modules(remove_duplicate=False):
        if id(part) in paths:
            raise NotPlainError(f"{name} is {paths[id(part)]} too; an export tells by which it ran")
        paths[id(part)] = name
    try:
        recorder = _Recorder(samples, KnownResults(known))
        for source, tensor in sources.items():
            recorder.place(source, tensor)
        with (
            _paths(paths, recorder.stack),
            _attributes_kept(wrapped),
            _Slices(),
            enable_python_dispatcher(),
            recorder,
        ):
            result = wrapped(*leaves)
    except Exception as error:
        raise NotPlainError(str(error)) from error
    return recorder.finish(result), tuple(result)


class _Recorder(ProxyTorchDispatchMode):
    """Writes down every call above autograd; only a mode of this class is let in there."""

    def __init__(self, samples: int, known: KnownResults) -> None:
        # Not that of the parent, which prepares for more than is recorded here.
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[Any] = []
        self.samples = samples
        self.known = known
        self.builder = ProgramBuilder({}, torch.device("meta"))
        self.stack: list[str] = []
        self.nodes: dict[int, fx.Node] = {}
        self.factories: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is given twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it takes the import of all of it

    def place(self, source: PlaceholderSource, tensor: torch.Tensor) -> None:
        """A tensor that is there before the forward runs."""
        if not tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise NotPlainError(f"{source.name} is not a plain tensor on the meta device")
        node = self.builder.graph.placeholder(source.name.replace(".", "_"))
        self.builder.sources[node] = source
        self.keep(tensor, node)

    def keep(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        node.meta["val"] = tensor
        node.meta["storage"] = tensor.untyped_storage()._cdata

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise NotPlainError(f"{func} runs without gradients, or under autocast")
        written_args, written_kwargs = tree_map(self.node_of, (args, kwargs))
        with no_python_dispatcher(), self.known:  # whose kernels in Python take many times as long
            result = func(*args, **kwargs)
        graph = self.builder.graph
        name = graph._target_to_str(func.overloadpacket.__name__)  # as the export names it
        node = graph.create_node("call_function", func, written_args, written_kwargs, name=name)
        self.record(result, node)
        return result

    def node_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            # What torch.zeros and the like return is another tensor, around the same storage.
            node = self.factories.get(value.untyped_storage()._cdata)
            if node is None or node.meta["val"].shape != value.shape:
                raise NotPlainError("a tensor that is no parameter or buffer, nor was made here")
            self.keep(value, node)
        return self.nodes[id(value)]

    def record(self, result: Any, node: fx.Node) -> None:
        node.meta["nn_module_stack"] = {"": (self.stack[-1] if self.stack else "", None)}
        if isinstance(result, torch.Tensor):
            if not result.is_meta:
                raise NotPlainError("a tensor that is not on the meta device")
            self.keep(result, node)
            if not node.all_input_nodes:
                self.factories[node.meta["storage"]] = node
        elif isinstance(result, list | tuple):
            node.meta["val"] = result
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    item = self.builder.graph.call_function(operator.getitem, (node, i))
                    self.record(part, item)
        elif result is not None:
            raise NotPlainError("a value that is no tensor")

    def finish(self, result: Mapping[str, torch.Tensor]) -> FlatProgram:
        missing = [name for name, value in result.items() if id(value) not in self.nodes]
        if missing:
            raise NotPlainError(f"{', '.join(missing)} is not made from the batch")
        self.builder.result = [self.nodes[id(value)] for value in result.values()]
        program = self.builder.finish(self.samples)
        for node in program.calls:
            if "val" not in node.meta:
                raise NotPlainError("an output is no result of a call")
        return program


class _Slices(TorchFunctionMode):
    """Refuses slices that leave nothing out, such as the first of ``x[:, 0]``: they are calls where
    the size is a symbol, and none where it is a number.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _INDEXING:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, slice) and _may_be_whole(i, args[0].shape) for i in items):
                raise NotPlainError("a slice that leaves nothing out")
        return func(*args, **(kwargs or {}))


_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _may_be_whole(item: slice, shape: torch.Size) -> bool:
    return item.start in (None, 0) and (item.stop is None or item.stop in shape)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards every attribute of a module and its parts is as it was; refuses one that has been
    set, since the next forward may do something else.
    """
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    changed: list[str] = []
    try:
        yield
    finally:
        for now, was in before:
            names = [n for n in now.keys() | was if now.get(n) is not was.get(n)]
            if names:
                changed += names
                now.clear()
                now.update(was)
    if changed:
        raise NotPlainError(f"the forward sets {sorted(changed)[0]}")


@contextmanager
def _paths(paths: Mapping[int, str], stack: list[str]) -> Iterator[None]:
    """Inside, the path of the module that runs is on top of the stack."""

    def enter(part: nn.Module, inputs: Any) -> None:
        stack.append(paths.get(id(part), stack[-1] if stack else ""))

    def leave(part: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
