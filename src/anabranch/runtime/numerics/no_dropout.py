"""A forward pass without dropout, of the user's module and of captured stages.

Whoever compares two runs of a model that drops things out either lets both draw the same numbers
(``dropout``) or lets neither draw. Other random numbers, such as noise, are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CHANCES = ("p", "dropout_p", "dropout")
"""Names of the arguments that say how much is dropped."""

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
"""Functions that drop something out: which argument says how much, and its name. Whatever else they
call is not seen.
"""


class NoDropout(TorchFunctionMode):
    """Inside, dropout returns what it is given, in a module that runs as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PLACES:
            at, name = _PLACES[func]
            # A packed sequence has the sizes of its batches before the rest.
            at += func in _RECURRENT and len(args) > at and not isinstance(args[3], bool)
            if len(args) > at:
                args = (*args[:at], 0.0, *args[at + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


def without_dropout(module: fx.GraphModule) -> fx.GraphModule:
    """The same stage, which drops nothing."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copied))
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        for i, argument in enumerate(node.target._schema.arguments):
            if argument.name in _CHANCES:
                if i < len(node.args):
                    node.update_arg(i, 0.0)
                else:
                    node.update_kwarg(argument.name, 0.0)
    return fx.GraphModule(module, graph)
