"""Random operations of a stage, rewritten so that their numbers are the same under any plan::

    x ---> dropout(x, 0.1)            key, start ---> streams ---+
                                                                 v
                                      x ---> draw("aten::dropout", ..., x, 0.1)

A generator draws in the order of execution, which a plan changes. These numbers depend on the seed,
the step, the operation's place in the model and the sample's place in the batch.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anabranch.errors import CaptureError
from anabranch.graph.call_traits import CHANCES, SampleAxis, draws
from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import StageProgram
from anabranch.graph.flat_program import CALL, frame, is_random, schema_name
from anabranch.graph.samples.sample_axis import blocks, sample_axes
from anabranch.runtime.numerics.random_ops import DRAWS, counters, draw, streams

_CPU = torch.device("cpu")
_BY_INPUT = ("aten::native_dropout", "aten::scaled_dot_product_attention")
"""Operations whose random numbers have samples in the same dimension as their first argument."""


def chances(node: fx.Node) -> list[tuple[int, str]]:
    """Return place and name of the arguments of a call that are a probability of dropout."""
    target: Any = node.target
    if not is_random(target):
        return []
    names = CHANCES if "dropout" in schema_name(node) else CHANCES[1:]  # not of bernoulli_
    return [(i, a.name) for i, a in enumerate(target._schema.arguments) if a.name in names]


class BySample:
    """Rewrites stages of one model."""

    def __init__(self, captured: Captured, device: torch.device = _CPU) -> None:
        self._captured, self._device = captured, device

    @cached_property
    def _axes(self) -> list[tuple[fx.Node, SampleAxis | None]]:
        """For each call of the model, the call itself and the sample axis of its random numbers."""
        samples = self._captured.programs.samples
        program = self._captured.programs.at(samples)
        other = self._captured.programs.at(2 * samples)
        axes = sample_axes(program, other, self._captured.assumption.reordering)
        result = []
        for node in program.calls:
            source = node.all_input_nodes[0] if schema_name(node) in _BY_INPUT else node
            result.append((node, axes.get(source)))
        return result

    def rewritten(self, program: StageProgram, samples: int) -> fx.GraphModule | None:
        """Return the stage with two arguments in front of its own: the step's key, and the place of
        the first sample in the batch; None if it draws nothing.

        Raises:
            CaptureError: naming an operation that cannot be rewritten.
        """
        module = program.module
        for name, inside in module.named_modules():
            if inside is not module and isinstance(inside, fx.GraphModule):
                inner = next((node for node in inside.graph.nodes if draws(node)), None)
                if inner is not None:
                    raise _refusal(inner, f"it is inside of an autocast region of its own ({name})")
        if not any(draws(node) for node in module.graph.nodes):
            return None
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        first = graph.placeholder("key"), graph.placeholder("start")
        graph.output(graph.graph_copy(module.graph, copied))
        pairs = [(copied[node], node) for node in module.graph.nodes if draws(node)]
        calls = [old.meta[CALL] for _, old in pairs]
        with graph.inserting_before(pairs[0][0]):
            rows = graph.call_function(streams, (*first, calls, samples))
        for row, (new, old) in enumerate(pairs):
            self._replace(graph, new, old, rows, row, samples)
        result = fx.GraphModule(module, graph)
        # A buffer on the device: a list would be copied there in every micro-batch.
        result.register_buffer("_counters", counters(calls, self._device), persistent=False)
        with graph.inserting_before(rows):
            rows.update_arg(2, graph.get_attr("_counters"))
        graph.lint()
        result.recompile()
        return result

    def _replace(
        self, graph: fx.Graph, new: fx.Node, old: fx.Node, rows: fx.Node, row: int, samples: int
    ) -> None:
        name = schema_name(old)
        call, axis = self._axes[old.meta[CALL]]
        assert schema_name(call) == name
        if name not in DRAWS:
            raise _refusal(old, "its numbers cannot be told apart by sample")
        if axis is None or axis.trouble:
            raise _refusal(old, axis.trouble if axis else "it is not one tensor")
        shape = _shape(self._captured.programs.at(samples).calls[old.meta[CALL]])
        if name.startswith("aten::feature") and axis.dim > 1:
            raise _refusal(old, f"its samples are in dimension {axis.dim}, within a feature")
        if name == "aten::scaled_dot_product_attention" and axis.dim >= len(shape) - 2:
            raise _refusal(old, f"its samples are in dimension {axis.dim}, which it sums over")
        with graph.inserting_before(new):
            position = rows, row, blocks(axis, shape, samples), shape
            drawn = graph.call_function(draw, (name, *position, *new.args), dict(new.kwargs))
        drawn.meta = dict(old.meta)
        new.replace_all_uses_with(drawn)
        graph.erase_node(new)


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the numbers that a call draws."""
    name = schema_name(node)
    if name == "aten::scaled_dot_product_attention":
        query, key = (arg.meta["val"].shape for arg in node.args[:2])  # type: ignore[union-attr]
        return (*query[:-1], key[-2])
    value = node.meta["val"]
    shape = tuple((value[0] if isinstance(value, tuple) else value).shape)
    if name.startswith("aten::feature"):
        return (*shape[:2], *(1 for _ in shape[2:]))
    return shape


def _refusal(node: fx.Node, reason: str) -> CaptureError:
    where = frame(node) or "the model itself"
    return CaptureError(
        f"{schema_name(node)} in {where} (call {node.name}) draws random numbers that cannot be "
        f"the same under any plan: {reason}; leave it out of training (such as dropout=0), write "
        "it with nn.Dropout or torch.rand_like on a tensor whose samples are one dimension, draw "
        "and use it where batches are made (as for mixup), or "
        'leave the option dropout at "stage"'
    )


_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.native_dropout, torch.alpha_dropout),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout),
)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

_PLACES = {
    **dict.fromkeys(_DROPOUTS, (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
    **dict.fromkeys(_RECURRENT, (5, "dropout")),
}
"""Function with dropout -> (position, name) of the argument with the probability. Functions that it
calls inside are not seen.
"""


class NoDropout(TorchFunctionMode):
    """Mode in which dropout returns its input, in an unchanged module.

    To compare two runs of a model with dropout, either both draw the same numbers or neither draws.
    Other random numbers, such as noise, are not affected.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PLACES:
            at, name = _PLACES[func]
            # With a packed sequence the sizes of its batches come before the other arguments.
            at += func in _RECURRENT and len(args) > at and not isinstance(args[3], bool)
            if len(args) > at:
                args = (*args[:at], 0.0, *args[at + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


def without_dropout(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same stage without dropout."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        for i, name in chances(node):
            if i < len(node.args):
                node.update_arg(i, 0.0)
            else:
                node.update_kwarg(name, 0.0)
    return fx.GraphModule(module, graph)
