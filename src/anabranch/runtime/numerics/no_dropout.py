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

_FUNCTIONS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.native_dropout, torch.alpha_dropout),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout),
}


class NoDropout(TorchFunctionMode):
    """Inside, dropout returns what it is given, in a module that runs as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FUNCTIONS:
            if len(args) > 1:
                args = (args[0], 0.0, *args[2:])
            else:
                kwargs["p"] = 0.0
        elif func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
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
